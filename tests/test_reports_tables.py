"""What the tables say of a run, on records whose counts are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_reports_sample import description, record, sample

from reports import tables
from reports.record import Record, Status
from reports.store import RunFolder


def table_of(folder: Path, *records: Record) -> pd.DataFrame:
    with RunFolder.create(folder) as run:
        for each in records:
            run.append(each)
    return run.merge()


def mmcv(**changes: Any) -> Record:
    return record(**{"provider": "mmcv", "version": "2.2.0", **changes})


def test_a_cell_counts_every_status_and_keeps_the_worst_error(tmp_path: Path) -> None:
    cells = tables.matrix(
        table_of(
            tmp_path,
            record(case="a"),
            mmcv(case="a", err_over_bound=0.5),
            mmcv(case="b", err_over_bound=7.0, status=Status.DEFECT),
            mmcv(case="b", err_over_bound=3.0, status=Status.KNOWN),
            mmcv(case="c", err_over_bound=math.nan, status=Status.UNSUPPORTED),
            mmcv(case="c", err_over_bound=math.nan, status=Status.CRASHED, boundary="edge"),
        )
    )
    assert list(zip(cells["provider"], cells["boundary"], strict=True)) == [
        ("mmcv", "interior"),
        ("mmcv", "edge"),
        ("reference", "interior"),
    ]
    cell = cells.iloc[0]
    counts = {str(status): cell[str(status)] for status in Status if cell[str(status)]}
    assert counts == {"match": 1, "defect": 1, "known": 1, "unsupported": 1}
    assert (cell["compared"], cell["cases"], cell["err_over_bound"], cell["worst"]) == (3, 2, 7.0, "defect")
    edge = cells.iloc[1]
    assert (edge["crashed"], edge["compared"], edge["cases"], edge["worst"]) == (1, 0, 0, "crashed")
    assert math.isnan(edge["err_over_bound"])


def test_the_matrix_of_a_run_adds_up(tmp_path: Path) -> None:
    records = sample()
    table = table_of(tmp_path, *records)
    names = [str(status) for status in Status]
    for counted in (tables.matrix(table), tables.summary(table)):
        assert int(counted[names].to_numpy().sum()) == len(records)
        for status in Status:
            assert counted[str(status)].sum() == sum(each.status == status for each in records)


def test_boundaries_go_outwards_and_quantities_by_order() -> None:
    boundaries = ["outside", "zebra", "above_edge", "edge", "below_edge", "interior", "edge-1e-9"]
    assert sorted(boundaries, key=tables.boundary_rank) == [
        *("interior", "below_edge", "edge", "above_edge", "edge-1e-9", "outside", "zebra"),
    ]
    quantities = ["gradgrad:input", "grad:weight", "zebra", "grad:offset", "output", "grad:conv_offset.bias"]
    assert sorted(quantities, key=tables.quantity_rank) == [
        *("output", "grad:offset", "grad:weight", "grad:conv_offset.bias", "gradgrad:input", "zebra"),
    ]


def test_equal_divergences_are_one_row_with_the_worst_record(tmp_path: Path) -> None:
    defect = {"status": Status.DEFECT}
    found = tables.divergences(
        table_of(
            tmp_path,
            mmcv(case="a", err_over_bound=5.0, **defect),
            mmcv(case="b", err_over_bound=9.0, elements=100, **defect),
            mmcv(case="c", err_over_bound=9.0, elements=4, dtype="float64", message="the smallest", **defect),
            mmcv(case="c", err_over_bound=math.nan, **defect),
            mmcv(case="a", quantity="grad:input", err_over_bound=99.0, **defect),
            mmcv(case="a", status=Status.KNOWN, ledger="x", err_over_bound=1e9),
            mmcv(case="a", status=Status.KNOWN, ledger="y", err_over_bound=1e9),
            mmcv(case="z", status=Status.VACUOUS, err_over_bound=math.nan),
            record(status=Status.CONVENTION, convention="closed"),
            record(status=Status.DRIFT),
            record(status=Status.CRASHED),
            record(status=Status.TIMED_OUT),
            record(status=Status.UNSUPPORTED),
            record(),
        )
    )
    assert list(found["status"]) == [
        *("defect", "defect", "convention", "known", "known", "drift", "crashed", "timed out", "vacuous"),
    ]
    assert list(found["quantity"][:2]) == ["grad:input", "output"]
    row = found.iloc[1]
    assert (row["case"], row["message"], row["err_over_bound"]) == ("c", "the smallest", 9.0)
    assert (row["count"], row["cases"], row["dtypes"]) == (4, 3, "float32 3, float64 1")


@pytest.mark.parametrize("column", tables.DIVERGENCE_KEY)
def test_divergences_that_differ_in_one_thing_stay_apart(tmp_path: Path, column: str) -> None:
    other = Status.KNOWN if column == "status" else "another"
    one = mmcv(status=Status.DEFECT)
    found = tables.divergences(table_of(tmp_path, one, mmcv(**{"status": Status.DEFECT, column: other})))
    assert len(found) == 2


def test_refusals_are_counted_by_question_with_the_commonest_message(tmp_path: Path) -> None:
    refused = {"status": Status.UNSUPPORTED, "question": "gradgradcheck", "err_over_bound": math.nan}
    found = tables.unsupported(
        table_of(
            tmp_path,
            mmcv(case="a", message="no", **refused),
            mmcv(case="a", message="no", **refused),
            mmcv(case="b", message="empty batch", **refused),
            mmcv(case="b", status=Status.UNSUPPORTED, message="empty batch"),
            record(),
        )
    )
    assert found.to_dict("records") == [
        {
            "provider": "mmcv",
            "version": "2.2.0",
            "operator": "deform_conv2d",
            "question": "gradgradcheck",
            "count": 3,
            "cases": 2,
            "message": "no",
            "messages": 2,
        },
        {
            "provider": "mmcv",
            "version": "2.2.0",
            "operator": "deform_conv2d",
            "question": "output",
            "count": 1,
            "cases": 1,
            "message": "empty batch",
            "messages": 1,
        },
    ]


def test_an_absent_provider_is_named_wherever_it_is_said(tmp_path: Path) -> None:
    gone = record(provider="tvdcn", version="", status=Status.UNAVAILABLE, message="not built")
    table = table_of(tmp_path, record(), gone, gone)
    found = tables.unavailable(table, description())
    assert dict(zip(found["provider"], found["reason"], strict=True)) == {
        "paddle": "paddlepaddle is not installed",
        "tvdcn": "not built",
    }
    assert tables.verdict(table, description()).sentence == (
        "1 comparison of reference 0.1.0 on 1 case: no new defect; and paddle, tvdcn took no part."
    )
    assert "tvdcn is not available: not built" in tables.not_compared(table, description())


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (Status.DEFECT, "1 new defect in mmcv 2.2.0"),
        (Status.CRASHED, "1 crash in mmcv 2.2.0"),
        (Status.TIMED_OUT, "1 timeout in mmcv 2.2.0"),
        (Status.VACUOUS, "1 comparison that tested no element in mmcv 2.2.0"),
    ],
)
def test_what_nobody_explained_spoils_the_verdict(tmp_path: Path, status: Status, said: str) -> None:
    verdict = tables.verdict(table_of(tmp_path, record(), mmcv(status=status)), {})
    assert not verdict.clean
    assert said in verdict.sentence
    assert ("no new defect" in verdict.sentence) == (status != Status.DEFECT)


@pytest.mark.parametrize("status", [Status.MATCH, Status.KNOWN, Status.CONVENTION, Status.DRIFT])
def test_what_is_explained_does_not(tmp_path: Path, status: Status) -> None:
    assert tables.verdict(table_of(tmp_path, record(), mmcv(status=status)), {}).clean


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ({"stale_ledger": ["x"]}, "1 ledger entry no longer holds"),
        ({"damaged": ["records/main.jsonl:1", "records/main.jsonl:2"]}, "2 recorded lines could not be read"),
        ({"finished": ""}, "the run did not finish"),
    ],
)
def test_a_flawed_run_is_not_clean(tmp_path: Path, flaw: dict[str, Any], said: str) -> None:
    verdict = tables.verdict(table_of(tmp_path, record()), {**description(), **flaw})
    assert not verdict.clean
    assert said in verdict.sentence


def test_a_run_that_compared_nothing_is_not_clean(tmp_path: Path) -> None:
    for records in ([], [record(status=Status.UNSUPPORTED)]):
        verdict = tables.verdict(table_of(tmp_path, *records), {})
        assert (verdict.sentence, verdict.clean) == ("Nothing was compared.", False)
