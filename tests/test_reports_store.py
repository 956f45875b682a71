"""The folder of a run: nothing recorded is lost, and who recorded it makes no difference."""

from __future__ import annotations

import json
import math
import re
import resource
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
        for number, each in enumerate(records):
            folder.append(f"{each.case}-{number}", [each])


def same(left: list[Record], right: list[Record]) -> bool:
    """Equality that takes a NaN for equal to itself."""
    return [each.to_json() for each in left] == [each.to_json() for each in right]


def test_the_table_holds_what_was_recorded(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, *RECORDS)
    merged = folder.tabulate(description())
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
    assert dict(empty.tabulate().dtypes) == dict(full.tabulate().dtypes)


def test_the_order_of_the_items_makes_no_difference(tmp_path: Path) -> None:
    one, two = RunFolder.create(tmp_path), RunFolder.create(tmp_path)
    write(one, *RECORDS)
    with two:
        two.append("all", RECORDS[::-1])
    pd.testing.assert_frame_equal(one.tabulate().drop(columns="run"), two.tabulate().drop(columns="run"))


def test_an_item_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.append("first", RECORDS[:1])
    assert same(folder.records()[0], RECORDS[:1])
    folder.close()


def test_an_item_that_comes_again_supersedes_what_was_there(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append("one", RECORDS[:2], finished=False)
        folder.append("other", RECORDS[3:])
        assert [item.finished for item in folder.items()[0].values()] == [False, True]
        folder.append("one", RECORDS[2:3])
        assert [item.finished for item in folder.items()[0].values()] == [True, True]
        assert same(folder.records()[0], RECORDS[2:])


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_line_cut_short_loses_no_other(tmp_path: Path, kept: int) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, *RECORDS[:2])
    file = folder.path / "records.jsonl"
    first, second, _ = file.read_text().split("\n")
    file.write_text(f"{first}\n{second[:kept]}")
    assert folder.items()[1] == ["records.jsonl:2"]
    with RunFolder(folder.path) as again:
        again.append("third", [RECORDS[2]])
    records, damaged = folder.records()
    assert same(records, sorted([RECORDS[0], RECORDS[2]], key=lambda each: each.case))
    assert damaged == ["records.jsonl:2"]
    folder.tabulate(description())
    assert store.read_description(folder.path)["damaged"] == damaged


def test_a_line_that_lost_only_its_end_of_line_is_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, RECORDS[0])
    file = folder.path / "records.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    with folder:
        folder.append("other", [RECORDS[0]])
    assert same(folder.records()[0], RECORDS[:1] * 2)
    assert folder.records()[1] == []


def test_a_full_disk_is_an_error_and_loses_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write(folder, *RECORDS)
    everything, limits = folder.records()[0], resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (folder.path / "records.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), folder:
            folder.append("too much", RECORDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(folder.records()[0], everything)
    assert folder.records()[1] == ["records.jsonl:5"]
    with folder:
        folder.append("too much", [])
    assert same(folder.records()[0], everything)


def test_the_description_survives_a_merge_without_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.describe({"tier": "smoke"})
    folder.tabulate()
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
    with pytest.raises(FileNotFoundError, match="path must be the folder of a run"):
        RunFolder(tmp_path / "absent")
    with pytest.raises(TypeError, match="records must be Records, got dict"):
        folder.append("item", [{}])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        folder.append("item", [record(elements=np.int64(3))])
    assert folder.records() == ([], [])
    with pytest.raises(FileNotFoundError, match="run must be an id"):
        store.find_run("", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"folder must hold records\.parquet"):
        store.read_table(folder.path)
    folder.tabulate().drop(columns="worst").to_parquet(folder.path / "records.parquet")
    with pytest.raises(ValueError, match="lacks worst"):
        store.read_table(folder.path)
