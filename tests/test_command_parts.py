"""Runs that break and go on, and runs in parts: the records are those of one unbroken run."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from test_command import QUICK

from conformance.parts import Shard
from reports.__main__ import main
from reports.store import RunFolder, read_description

ROOT = Path(__file__).parents[1]
CASES = [f"--case={QUICK}{rest}" for rest in ("", ",offsets=edge_low", ",offsets=rim", ",offsets=outside")]
# Three questions are enough to have something in flight.
ITEMS = ["-k", "test_output or test_gradients or test_double_backward"]
OPTIONS = ["--without=composite,torchvision,mmcv", "--provider=strange_providers:Killer", *CASES, *ITEMS]


def run(
    runs: Path,
    *arguments: str,
    suite: str = "conformance/",
    prepare: Callable[[], None] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            suite,
            "-q",
            *("-p", "no:cacheprovider"),
            f"--runs={runs}",
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests", **environment},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=prepare,
    )


def table(runs: Path) -> pd.DataFrame:
    """The newest run's records, without what no two runs have in common."""
    found = pd.read_parquet(runs / "latest" / "records.parquet")
    return found.drop(columns=["run", "seconds"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    runs = tmp_path_factory.mktemp("unbroken")
    done = run(runs, *OPTIONS)
    assert done.returncode == 0, done.stdout
    return table(runs)


def resume(runs: Path, unbroken: pd.DataFrame, *arguments: str) -> None:
    """Goes on with the newest run, and checks that nothing is different in the end."""
    before = RunFolder((runs / "latest").resolve())
    kept = before.items()[0]
    assert 0 < len(kept) < 12
    assert "finished" not in read_description(before.path)
    done = run(runs, *OPTIONS, "--resume=latest", *arguments)
    assert done.returncode == 0, done.stdout
    assert f"{12 - len(kept)} passed" in done.stdout
    assert (runs / "latest").resolve() == before.path
    pd.testing.assert_frame_equal(table(runs), unbroken)
    said = read_description(before.path)
    assert said["finished"]
    assert said["damaged"] == []
    again = run(runs, *OPTIONS, "--resume=latest")
    assert again.returncode == 4
    assert f"--resume: {before.run} has finished, there is nothing to resume" in again.stderr


def test_a_killed_run_goes_on(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    broken = run(tmp_path, *OPTIONS, KILL="self", MARKER=str(tmp_path / "marker"))
    assert broken.returncode == -signal.SIGKILL
    # It was in the midst of a line, too.
    with (tmp_path / "latest" / "records.jsonl").open("a") as file:
        file.write('{"item":"conformance/test_gra')
    resume(tmp_path, unbroken)


def test_a_killed_controller_of_two_workers_goes_on(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    broken = run(tmp_path, *OPTIONS, "-n2", KILL="parent", MARKER=str(tmp_path / "marker"))
    assert broken.returncode == -signal.SIGKILL
    resume(tmp_path, unbroken, "-n2")


def test_a_killed_worker_loses_the_case_in_flight_alone(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    broken = run(tmp_path, *OPTIONS, "-n2", KILL="self", MARKER=str(tmp_path / "marker"))
    assert broken.returncode == 1, broken.stdout
    found = table(tmp_path)
    (died,) = found[found["provider"] == "(one of them)"].to_dict("records")
    assert died["status"] == "crashed"
    lost = (unbroken["case"] == died["case"]) & (unbroken["question"] == died["question"])
    assert 0 < lost.sum() < 20
    rest = found[found["provider"] != "(one of them)"]
    pd.testing.assert_frame_equal(rest.reset_index(drop=True), unbroken[~lost].reset_index(drop=True))


def test_a_full_disk_ends_the_run_which_goes_on(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    limit = 30_000  # more than the description, less than all records

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    broken = run(tmp_path, *OPTIONS, prepare=small_disk)
    assert broken.returncode == 3
    folder = (tmp_path / "latest").resolve()
    said = f"the records can't be written to {folder}: File too large; with --resume {folder.name} the run goes on"
    assert said in broken.stdout + broken.stderr
    assert "Traceback" not in broken.stdout + broken.stderr
    resume(tmp_path, unbroken)


def test_what_failed_before_the_break_fails_the_resumed_run(tmp_path: Path) -> None:
    options = [*OPTIONS[:1], "--provider=broken_providers:ClosedEdge", *OPTIONS[1:-2], "-ktest_gradients"]
    broken = run(tmp_path, *options, "-x")
    assert broken.returncode == 1, broken.stdout
    folder = RunFolder((tmp_path / "latest").resolve())
    assert len(folder.items()[0]) < len(CASES)
    rest = run(tmp_path, *options, "--resume=latest")
    assert rest.returncode == 1
    assert " failed" not in rest.stdout
    assert "1 new case of another convention in ClosedEdge" in rest.stdout
    assert read_description(folder.path)["finished"]


def test_an_error_of_the_suite_is_asked_again(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    options = [*OPTIONS, "-pbroken_suite", "-x"]
    broken = run(tmp_path, *options, BROKEN="yes")
    assert broken.returncode == 1, broken.stdout
    still = run(tmp_path, *options, "--resume=latest", BROKEN="yes")
    assert still.returncode == 1, still.stdout
    whole = run(tmp_path, *options, "--resume=latest")
    assert whole.returncode == 0, whole.stdout
    pd.testing.assert_frame_equal(table(tmp_path), unbroken)


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    broken = run(tmp_path, *OPTIONS, KILL="self", MARKER=str(tmp_path / "marker"))
    assert broken.returncode == -signal.SIGKILL
    for options, what in (
        ([*OPTIONS, f"--case={QUICK},offsets=last_pixel"], "the cases of"),
        (OPTIONS[:1] + OPTIONS[2:], "the providers of"),
        ([*OPTIONS, "--shard=1/2"], "the shard of"),
    ):
        done = run(tmp_path, *options, "--resume=latest")
        assert done.returncode == 4
        assert f"--resume: {what}" in done.stderr
        assert "Traceback" not in done.stderr
    done = run(tmp_path, *OPTIONS, "--resume=no-such-run")
    assert done.returncode == 4
    assert "run must be an id" in done.stderr


@pytest.mark.parametrize("text", ["0/3", "4/3", "x", "1", "1/0", "1/2/3", "-1/3", "1.0/3", "\u0661/3"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--shard: got '.*', expected K/N with K from 1 to N$"):
        Shard.parse(text)


def test_every_case_is_in_one_shard() -> None:
    ids = [f"case {number}" for number in range(1000)]
    for count in (1, 2, 7):
        shards = [Shard(number, count) for number in range(1, count + 1)]
        of = [[shard.has(case) for shard in shards].count(True) for case in ids]
        assert set(of) == {1}
        assert all(sum(map(shard.has, ids)) > 1000 / count / 2 for shard in shards)


def merge(runs: Path, *folders: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["merge", "--root", str(runs), *map(str, folders)])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


def test_shards_make_the_run_that_was_not_cut(tmp_path: Path, unbroken: pd.DataFrame) -> None:
    parts = []
    for number in (1, 2, 3):
        done = run(tmp_path, *OPTIONS, f"--shard={number}/3")
        assert done.returncode == 0, done.stdout
        parts.append((tmp_path / "latest").resolve())
    assert [read_description(part)["shard"] for part in parts] == ["1/3", "2/3", "3/3"]
    code, said = merge(tmp_path / "merged", *parts[::-1])
    assert code == 0, said
    assert "no new defect" in said
    pd.testing.assert_frame_equal(table(tmp_path / "merged"), unbroken)

    for folders, sentence in (
        (parts[:2], "runs: shard 3/3 is missing"),
        ([*parts, parts[0]], "overlap: both are shard 1/3"),
        ([tmp_path / "merged" / "latest"], "is no shard: it was made without --shard"),
    ):
        code, said = merge(tmp_path / "refused", *folders)
        assert code == 1
        assert sentence in said
    assert not (tmp_path / "refused").exists()

    for changes, sentence in (
        ({"identity": {"cases": "other"}}, "runs: the sources of"),
        ({"tier": "nightly"}, "is of the tier 'nightly'"),
        ({"finished": ""}, "did not finish; --resume it first"),
        ({"shard": "3/4"}, "they are of 3 and of 4 shards"),
    ):
        said_before = dict(read_description(parts[2]))
        RunFolder(parts[2]).describe({**said_before, **changes})
        code, said = merge(tmp_path / "refused", *parts)
        assert code == 1
        assert sentence in said
        RunFolder(parts[2]).describe(said_before)
    text = "".join((part / "records.jsonl").read_text() for part in parts)
    (parts[2] / "records.jsonl").write_text(text)
    code, said = merge(tmp_path / "refused", *parts)
    assert code == 1
    assert "overlap: both have conformance/test_" in said


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Two working copies, as two hosts would have them."""
    made = []
    for name in ("one", "two"):
        copy = tmp_path / name
        for folder in ("cases", "conformance", "kernels", "reports", "tests"):
            shutil.copytree(
                ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "runs")
            )
        for file in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / file, copy)
        made.append(copy)
    return made


@pytest.fixture
def hosts(copies: list[Path]) -> Iterator[list[str]]:
    """What --tx is given: a socket server in each working copy."""
    servers, addresses = [], []
    for copy in copies:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        servers.append(
            subprocess.Popen(
                [sys.executable, "-m", "execnet.script.socketserver", f"127.0.0.1:{port}"],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": f"{copy}:{copy}/tests"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        addresses.append(f"--tx=socket=127.0.0.1:{port}//chdir={copy}")
    yield addresses
    for server in servers:
        server.kill()
        server.wait()


def test_two_hosts_make_the_records_of_one(tmp_path: Path, hosts: list[str], unbroken: pd.DataFrame) -> None:
    done = run(tmp_path / "runs", *OPTIONS, "-d", *hosts, suite="-otestpaths=conformance")
    assert done.returncode == 0, done.stdout + done.stderr
    pd.testing.assert_frame_equal(table(tmp_path / "runs"), unbroken)


def test_a_path_for_other_hosts_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, *OPTIONS, "-d", "--tx=socket=127.0.0.1:1//chdir=/nowhere")
    assert done.returncode == 4
    assert "can't be given the path conformance/, expected -o testpaths=conformance instead" in done.stderr


def test_a_host_with_other_sources_is_refused(tmp_path: Path, copies: list[Path], hosts: list[str]) -> None:
    with (copies[1] / "cases" / "case.py").open("a") as file:
        file.write("# changed\n")
    done = run(tmp_path / "runs", *OPTIONS, "-d", *hosts, suite="-otestpaths=conformance")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "this worker's sources differ from the controller's" in done.stdout + done.stderr
