"""The folder of a run: nothing recorded is lost, and who recorded it makes no difference."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_reports_sample import description, record

from reports import store
from reports.record import Element, Record, Status
from reports.store import RunFolder

RECORDS = [
    record(case="b", quantity="output"),
    record(
        case="a", provider="torchvision", version="0.29.1", status=Status.UNSUPPORTED, err_over_bound=math.nan
    ),
    record(
        case="a",
        question="gradients",
        quantity="grad:offset",
        status=Status.TIMED_OUT,
        message="\u00fc | \n<b>",
    ),
    record(
        case="a",
        status=Status.DEFECT,
        err_over_bound=math.inf,
        worst=(
            Element((0, 1), math.nan, -math.inf, math.inf, ((-1.0, 2 - 1e-13, "edge"),)),
            Element((), 1, 2, 3),
        ),
    ),
]


def write(folder: RunFolder, *records: Record) -> None:
    with folder:
        for each in records:
            folder.append(each)


def same(left: list[Record], right: list[Record]) -> bool:
    """Equality that takes a NaN for equal to itself."""
    return [each.to_json() for each in left] == [each.to_json() for each in right]


def test_the_table_holds_what_was_recorded(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, *RECORDS)
    merged = folder.merge(description())
    table = pd.read_parquet(folder.path / "records.parquet")
    pd.testing.assert_frame_equal(merged, table)
    assert tuple(table.columns) == store.COLUMNS
    assert set(store.COLUMNS) == {*Record.__dataclass_fields__, "run"}
    assert set(table["run"]) == {folder.run}
    assert list(table["case"]) == ["a", "a", "a", "b"]
    assert list(table["status"]) == ["timed out", "defect", "unsupported", "match"]
    rows = table.drop(columns="run").to_dict("records")
    again = [Record.from_json(json.dumps({**row, "worst": json.loads(row["worst"])})) for row in rows]
    assert same(again, folder.records()[0])
    assert same(sorted(again, key=Record.to_json), sorted(RECORDS, key=Record.to_json))


def test_an_empty_run_has_a_table_of_the_same_types(tmp_path: Path) -> None:
    empty, full = RunFolder.create(tmp_path), RunFolder.create(tmp_path)
    write(full, *RECORDS)
    assert dict(empty.merge().dtypes) == dict(full.merge().dtypes)


def test_two_workers_make_the_table_of_one(tmp_path: Path) -> None:
    one = RunFolder.create(tmp_path)
    write(one, *RECORDS)
    two = RunFolder.create(tmp_path)
    write(RunFolder(two.path, "gw1"), *RECORDS[::-2])
    write(RunFolder(two.path, "gw0"), *RECORDS[::2])
    assert sorted(file.name for file in (two.path / "records").iterdir()) == ["gw0.jsonl", "gw1.jsonl"]
    pd.testing.assert_frame_equal(one.merge().drop(columns="run"), two.merge().drop(columns="run"))
    assert len(list((two.path / "records").iterdir())) == 2


def test_a_record_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.append(RECORDS[0])
    assert same(folder.records()[0], RECORDS[:1])
    folder.close()


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_line_cut_short_loses_no_other(tmp_path: Path, kept: int) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, *RECORDS[:2])
    file = folder.path / "records" / "main.jsonl"
    first, second, _ = file.read_text().split("\n")
    file.write_text(f"{first}\n{second[:kept]}")
    assert folder.records()[1] == ["records/main.jsonl:2"]
    write(RunFolder(folder.path), RECORDS[2])
    records, damaged = folder.records()
    assert same(records, sorted([RECORDS[0], RECORDS[2]], key=lambda each: each.case))
    assert damaged == ["records/main.jsonl:2"]
    folder.merge(description())
    assert store.read_description(folder.path)["damaged"] == damaged


def test_a_line_that_lost_only_its_end_of_line_is_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    file = folder.path / "records" / "main.jsonl"
    file.write_text(RECORDS[0].to_json())
    write(folder, RECORDS[0])
    assert same(folder.records()[0], RECORDS[:1] * 2)
    assert folder.records()[1] == []


def test_the_description_survives_a_merge_without_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.describe({"tier": "smoke"})
    folder.merge()
    assert store.read_description(folder.path) == {"run": folder.run, "tier": "smoke", "damaged": []}


def test_latest_points_to_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RunFolder.create(tmp_path / "runs")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-[0-9a-f]{4}", first.run)
    assert store.find_run(root=tmp_path / "runs") == first.path
    second = RunFolder.create(tmp_path / "runs")
    assert (tmp_path / "runs" / "latest").resolve() == second.path

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    third = RunFolder.create(tmp_path / "runs")
    assert (tmp_path / "runs" / "latest").read_text().strip() == third.run
    assert store.find_run("latest", tmp_path / "runs") == third.path
    monkeypatch.undo()
    fourth = RunFolder.create(tmp_path / "runs")
    assert store.find_run("latest", tmp_path / "runs") == fourth.path
    assert store.find_run(first.run, tmp_path / "runs") == first.path
    assert store.find_run(str(first.path), tmp_path) == first.path
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith(".")) == []


def test_wrong_arguments_get_a_sentence(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with pytest.raises(ValueError, match=r"worker must be a name .* got '\.\./gw0'"):
        RunFolder(folder.path, "../gw0")
    with pytest.raises(FileNotFoundError, match="path must be the folder of a run"):
        RunFolder(tmp_path / "absent")
    with pytest.raises(TypeError, match="record must be a Record, got dict"):
        folder.append({})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        folder.append(record(elements=np.int64(3)))
    assert folder.records() == ([], [])
    with pytest.raises(FileNotFoundError, match="run must be an id"):
        store.find_run("", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"folder must hold records\.parquet"):
        store.read_table(folder.path)
    folder.merge().drop(columns="worst").to_parquet(folder.path / "records.parquet")
    with pytest.raises(ValueError, match="lacks worst"):
        store.read_table(folder.path)
