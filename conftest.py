"""Options and fixtures of `pytest conformance/`."""

from __future__ import annotations

import os

# Before torch starts its threads: those of two xdist workers must not spin against each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from cases.sweep import TIERS
from conformance import plugin
from conformance.bench import Bench
from conformance.isolation import Limits


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's own options."""
    group = parser.getgroup("gradparity", "gradient parity")
    group.addoption("--tier", choices=TIERS, default="default", help="how much to sweep (default: default)")
    group.addoption("--case", action="append", default=[], metavar="ID", help="run exactly this case")
    group.addoption(
        "--provider",
        action="append",
        default=[],
        metavar="SPEC",
        help="judge this one as well: MODULE:ATTRIBUTE, or NAME=python:EXECUTABLE[,kind=KIND] of another environment",
    )
    group.addoption(
        "--isolate", action="append", default=[], metavar="NAMES", help="ask these in processes of their own"
    )
    group.addoption(
        "--time-limit",
        type=float,
        default=Limits.time_s,
        metavar="SECONDS",
        help="of one question in a process of its own (default: %(default)g)",
    )
    group.addoption(
        "--memory-limit",
        type=float,
        default=8.0,
        metavar="GIB",
        help="of one question in a process of its own (default: %(default)g)",
    )
    group.addoption(
        "--without", action="append", default=[], metavar="NAMES", help="leave these providers out"
    )
    group.addoption(
        "--require", action="append", default=[], metavar="NAMES", help="fail unless these can be compared"
    )
    group.addoption(
        "--ledger", action="append", default=[], metavar="FILE", help="known divergences beside the project's"
    )
    group.addoption(
        "--shard",
        default="",
        metavar="K/N",
        help="the K-th of N parts of the cases; `reports merge` joins them",
    )
    group.addoption(
        "--resume", metavar="RUN", help="go on with this broken run: its id, its folder, or latest"
    )
    group.addoption("--runs", metavar="FOLDER", help="where the run's folder goes (default: reports/runs)")


def pytest_configure(config: pytest.Config) -> None:
    """Starts a run when the conformance folder is what pytest was asked for."""
    plugin.start(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each case that a question asks about."""
    if "case" in metafunc.fixturenames and plugin.RUN in metafunc.config.stash:
        cases = filter(metafunc.module.asks, metafunc.config.stash[plugin.RUN].cases)
        metafunc.parametrize("case", list(cases), ids=str)


@pytest.fixture(scope="session")
def bench(pytestconfig: pytest.Config) -> Bench:
    """Where questions are put to the providers."""
    return pytestconfig.stash[plugin.RUN].bench
