"""Every question can fail: each broken provider is caught by the smoke tier, and by the question that it is about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from broken_providers import BROKEN, Broken

ROOT = Path(__file__).parents[1]
QUESTIONS = {"output", "gradients", "modules", "gradcheck", "gradgradcheck", "double_backward"}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """All records of one smoke run with the reference and every broken provider."""
    runs = tmp_path_factory.mktemp("runs")
    providers = [f"--provider=broken_providers:{cls.__name__}" for cls in BROKEN]
    command = [
        *(sys.executable, "-m", "pytest", "conformance/", "--tier=smoke", "-q", "-n2", "--tb=no"),
        *("--without=composite", "--without=torchvision", "--without=mmcv", f"--runs={runs}"),
        *providers,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    return pd.read_parquet(runs / "latest" / "records.parquet")


def test_each_question_has_a_broken_provider() -> None:
    assert {cls.caught_by for cls in BROKEN} == QUESTIONS


def test_the_reference_is_not_caught(records: pd.DataFrame) -> None:
    mine = records[records["provider"] == "reference"]
    assert set(mine["status"]) == {"match", "vacuous"}
    assert set(mine["question"]) == QUESTIONS


@pytest.mark.parametrize("broken", BROKEN, ids=lambda cls: f"{cls.__name__}-{cls.caught_by}")
def test_is_caught(broken: type[Broken], records: pd.DataFrame) -> None:
    mine = records[records["provider"] == broken.__name__]
    caught = mine[mine["status"].isin(["defect", "convention", "crashed"])]
    assert broken.caught_by in set(caught["question"]), sorted(set(caught["question"]))
