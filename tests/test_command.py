"""`pytest conformance/` as a command: exit status, what it says, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
QUICK = (
    "deform_conv2d/dtype=float64,batch=1,in_channels=1,out_channels=1,size=2x2,kernel=1x1,padding=0x0,"
    "mask=no,bias=no"
)
EDGE = f"{QUICK},offsets=edge_low"
HOSTILE = f"{QUICK},offsets=non_finite"
ALONE = "--without=composite,torchvision,mmcv"


def run(runs: Path, *arguments: str, python_path: Path = ROOT / "tests") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its records below ``runs``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "conformance/",
        "-q",
        "--tb=short",
        f"--runs={runs}",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def records(runs: Path) -> pd.DataFrame:
    """The newest run's table."""
    return pd.read_parquet(runs / "latest" / "records.parquet")


def write_ledger(folder: Path, **changes: str) -> Path:
    """A ledger of one entry, which knows ClosedEdge's convention unless changed."""
    entry = {
        "id": "closed",
        "provider": "ClosedEdge",
        "versions": "==1",
        "operator": "deform_conv2d",
        "quantity": "grad*",
        "kind": "convention",
        "reason": "it is broken on purpose",
        "link": "",
        "case": EDGE,
        **changes,
    }
    path = folder / "ledger.toml"
    path.write_text(
        "[[divergence]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in entry.items())
    )
    return path


def test_a_run_that_matches(tmp_path: Path) -> None:
    done = run(tmp_path, ALONE, f"--case={EDGE}")
    assert done.returncode == 0, done.stdout
    latest = tmp_path / "latest"
    assert {path.name for path in latest.iterdir()} >= {
        "index.html",
        "report.md",
        "records.parquet",
        "run.json",
    }
    assert str((latest.resolve()) / "index.html") in done.stdout
    assert "Not compared" in done.stdout
    assert set(records(tmp_path)["case"]) == {EDGE}


def test_a_divergence_fails_unless_the_ledger_knows_it(tmp_path: Path) -> None:
    broken = (ALONE, f"--case={EDGE}", "--provider=broken_providers:ClosedEdge")
    unknown = run(tmp_path, *broken)
    assert unknown.returncode == 1
    assert "ClosedEdge 1: grad:offset convention closed" in unknown.stdout
    known = run(tmp_path, *broken, f"--ledger={write_ledger(tmp_path)}")
    assert known.returncode == 0, known.stdout
    row = records(tmp_path).query("provider == 'ClosedEdge' and quantity == 'grad:offset'").iloc[0]
    assert (row["status"], row["convention"], row["ledger"]) == ("convention", "closed", "closed")


def test_a_stale_entry_fails(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path, provider="OnlyInFloat32")
    done = run(
        tmp_path, ALONE, f"--case={EDGE}", "--provider=broken_providers:OnlyInFloat32", f"--ledger={ledger}"
    )
    assert done.returncode == 1
    assert "closed no longer holds" in done.stdout


def test_a_part_of_the_questions_makes_no_entry_stale(tmp_path: Path) -> None:
    ledger = write_ledger(tmp_path)
    done = run(
        tmp_path,
        ALONE,
        f"--case={EDGE}",
        "--provider=broken_providers:ClosedEdge",
        f"--ledger={ledger}",
        "-k",
        "test_output",
    )
    assert done.returncode == 0, done.stdout
    assert "only some of the questions were asked" in done.stdout


def test_a_ledger_entry_brings_its_case(tmp_path: Path) -> None:
    own = QUICK.replace("dtype=float64,", "dtype=float64,data=integer,")
    ledger = write_ledger(tmp_path, case=own)
    broken = "--provider=broken_providers:ClosedEdge"
    done = run(tmp_path, ALONE, "--tier=smoke", broken, f"--ledger={ledger}", "--collect-only")
    assert f"test_output[{own}]" in done.stdout


def test_a_crash_is_a_row(tmp_path: Path) -> None:
    done = run(tmp_path, ALONE, f"--case={HOSTILE}", "--provider=broken_providers:DiesOfNaN")
    assert done.returncode == 1
    table = records(tmp_path)
    crashed = table[table["provider"] == "DiesOfNaN"]
    assert set(crashed["status"]) == {"crashed"}
    assert crashed["message"].str.contains("SIGSEGV").all()
    assert set(table[table["provider"] == "reference"]["status"]) <= {"match", "vacuous"}


def test_a_dead_worker_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(
        "import os, signal\n\n\n"
        "class Killer:\n"
        "    name = 'killer'\n\n"
        "    def load(self):\n"
        "        return '1'\n\n"
        "    def deform_conv2d(self, *tensors, **arguments):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    case = "deform_conv2d/offsets=rim"
    arguments = (ALONE, f"--case={case}", "--provider=killer:Killer", "-n1", "--max-worker-restart=9")
    done = run(tmp_path, *arguments, python_path=tmp_path)
    assert done.returncode == 1
    crashed = records(tmp_path).query("status == 'crashed'")
    assert set(crashed["case"]) == {case}
    assert set(crashed["question"]) == {"output", "gradients", "double_backward"}
    assert "new crashes" in done.stdout


def test_a_run_that_compares_nothing_fails(tmp_path: Path) -> None:
    done = run(tmp_path, ALONE, "--without=reference", f"--case={EDGE}")
    assert done.returncode == 1
    assert "nothing was compared" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--require=nobody"], "--require: nobody is not available: there is no such provider in this run"),
        (["--without=nobody"], "--without: no provider 'nobody'"),
        (["--provider=nowhere:Nothing"], "--provider: 'nowhere:Nothing' can't be imported"),
        (["--provider=nowhere"], "--provider: got 'nowhere', expected MODULE:ATTRIBUTE"),
        (["--case=deform_conv2d/colour=red"], "case id: 'colour=red' is not AXIS=VALUE"),
        (["--case=nothing/default"], "case id: got 'nothing/default', expected OPERATOR/AXES"),
        (["--case=deform_conv2d/groups=3"], "in_channels is not a multiple of groups"),
        (["--case=deform_conv2d/device=cuda9"], "--case: there is no device 'cuda9' here"),
        (["--ledger=nowhere.toml"], "ledger nowhere.toml"),
    ],
)
def test_wrong_options_get_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = run(tmp_path, ALONE, *arguments)
    assert done.returncode == 4
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_records_are_the_same_under_xdist(tmp_path: Path) -> None:
    cases = [
        f"--case={case}"
        for case in (
            EDGE,
            HOSTILE,
            "roi_align/boxes=rim",
            "deform_conv2d_pack/default",
            "deform_conv2d/batch=33",
        )
    ]
    run(tmp_path / "alone", ALONE, *cases)
    run(tmp_path / "spread", ALONE, *cases, "-n2")
    alone, spread = (
        records(tmp_path / name).drop(columns=["run", "seconds"]) for name in ("alone", "spread")
    )
    pd.testing.assert_frame_equal(alone, spread)


def test_the_readme_s_provider_works(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "class MyPort" in block
    ]
    assert example.count("\n") < 30
    (tmp_path / "my_module.py").write_text(textwrap.dedent(example), encoding="utf-8")
    case = "deform_conv2d/offsets=rim"
    done = run(tmp_path, ALONE, f"--case={case}", "--provider=my_module:MyPort", python_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = records(tmp_path).query("provider == 'my-port'")
    assert set(mine["status"]) == {"match", "unsupported"}
    assert (mine["status"] == "match").sum() == 6


def test_other_pytest_runs_start_no_run(tmp_path: Path) -> None:
    before = set((ROOT / "reports").glob("runs/*"))
    subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_command.py", "--co", "-q"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert set((ROOT / "reports").glob("runs/*")) == before
