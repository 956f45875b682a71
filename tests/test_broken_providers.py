"""Every question can fail: each broken provider is caught, on a case of the sweep, by the question that it is about."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from broken_providers import BROKEN, Broken

from cases.case import Case
from cases.sweep import sweep
from conformance.bench import Bench
from conformance.ledger import Ledger
from conformance.providers import registry
from reports.record import Record, Status

ROOT = Path(__file__).parents[1]
FILES = {path.stem.removeprefix("test_") for path in (ROOT / "conformance").glob("test_*.py")}
# gradgradcheck stands beside gradcheck.
QUESTIONS = FILES | {"gradgradcheck"}
NOT_IN_SMOKE = {"compile_inductor"}
cases_of = functools.cache(sweep)
CAUGHT = (Status.DEFECT, Status.CONVENTION, Status.CRASHED)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """All records of one smoke run with the reference alone."""
    runs = tmp_path_factory.mktemp("runs")
    command = [
        *(sys.executable, "-m", "pytest", "conformance/", "--tier=smoke", "-q", "-n2", "--tb=no"),
        *("--without=composite", "--without=torchvision", "--without=mmcv", f"--runs={runs}"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return pd.read_parquet(runs / "latest" / "records.parquet")


def test_each_question_has_a_broken_provider() -> None:
    assert {cls.caught_by for cls in BROKEN} == QUESTIONS


def test_the_reference_is_not_caught(records: pd.DataFrame) -> None:
    assert set(records["status"]) == {"match", "vacuous"}
    assert set(records["question"]) == QUESTIONS - NOT_IN_SMOKE


def questions_of(module: ModuleType) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The test functions of a question's file, with the arguments that they are parametrized by."""
    for function in (value for name, value in vars(module).items() if name.startswith("test_")):
        marks = getattr(function, "pytestmark", [])
        names, values = (
            zip(*given, strict=True)
            if (given := [m.args for m in marks if m.name == "parametrize"])
            else ((), ())
        )
        for chosen in itertools.product(*values):
            yield function, dict(zip(names, chosen, strict=True))


def put(broken: Broken, question: str, case: Case) -> list[Record]:
    """What one question books about a broken provider on a case."""
    records: list[Record] = []
    bench = Bench([registry.load(broken)], Ledger([]), records.append)
    module = importlib.import_module(
        f"conformance.test_{'gradcheck' if question == 'gradgradcheck' else question}"
    )
    for function, arguments in questions_of(module) if module.asks(case) else ():
        try:
            function(case, bench, **arguments)
        except pytest.fail.Exception:
            assert inspect.getmodule(function) is module
    return [record for record in records if record.question == question]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: f"{cls.__name__}-{cls.caught_by}")
def test_is_caught(broken: type[Broken]) -> None:
    tier = "default" if broken.caught_by in NOT_IN_SMOKE else "smoke"
    provider = broken()
    # Of the operators that are broken, which are the methods that its class defines.
    cases = [case for case in cases_of(tier) if case.operator in vars(broken)]
    assert any(record.status in CAUGHT for case in cases for record in put(provider, broken.caught_by, case))
