"""What the tables say of a run, on records whose counts are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_reports_sample import description, record, sample

from cases import coordinates
from cases.operators import roi_align
from reports import tables
from reports.record import Record, Status
from reports.store import RunFolder


def table_of(folder: Path, *records: Record) -> pd.DataFrame:
    with RunFolder.create(folder) as run:
        run.append("all", records)
    return run.tabulate()


def mmcv(**changes: Any) -> Record:
    return record(**{"provider": "mmcv", "version": "2.2.0", **changes})


def test_a_cell_counts_every_outcome_and_keeps_the_worst_error(tmp_path: Path) -> None:
    cells = tables.matrix(
        table_of(
            tmp_path,
            record(case="a"),
            mmcv(case="a", err_over_bound=0.5),
            mmcv(case="b", err_over_bound=7.0, status=Status.DEFECT),
            mmcv(case="b", err_over_bound=3.0, status=Status.KNOWN),
            mmcv(case="c", err_over_bound=math.nan, status=Status.UNSUPPORTED),
            mmcv(case="d", err_over_bound=0.0, status=Status.VACUOUS),
            mmcv(case="c", err_over_bound=math.nan, status=Status.CRASHED, boundary="edge_low"),
            mmcv(case="d", err_over_bound=math.nan, status=Status.CRASHED, boundary="edge_low", ledger="x"),
        )
    )
    assert list(zip(cells["provider"], cells["boundary"], strict=True)) == [
        ("mmcv", "interior"),
        ("mmcv", "edge_low"),
        ("reference", "interior"),
    ]
    cell = cells.iloc[0]
    counts = {name: cell[name] for name in tables.OUTCOMES if cell[name]}
    assert counts == {"match": 1, "defect": 1, "known": 1, "unsupported": 1, "vacuous": 1}
    assert (cell["compared"], cell["cases"], cell["err_over_bound"], cell["worst"]) == (3, 2, 7.0, "defect")
    edge = cells.iloc[1]
    assert (edge["new crash"], edge["known crash"], edge["compared"], edge["cases"]) == (1, 1, 0, 0)
    assert edge["worst"] == "new crash"
    assert math.isnan(edge["err_over_bound"])


def test_the_matrix_of_a_run_adds_up(tmp_path: Path) -> None:
    records = sample()
    table = table_of(tmp_path, *records)
    for counted in (tables.matrix(table), tables.summary(table)):
        assert int(counted[list(tables.OUTCOMES)].to_numpy().sum()) == len(records)
        for status in (Status.MATCH, Status.VACUOUS, Status.DEFECT, Status.UNSUPPORTED):
            assert counted[str(status)].sum() == sum(each.status == status for each in records) > 0
        crashes = sum(each.status == Status.CRASHED for each in records)
        assert counted["new crash"].sum() + counted["known crash"].sum() == crashes


def test_providers_come_in_the_order_of_the_run(tmp_path: Path) -> None:
    table = table_of(tmp_path, mmcv(), record(), record(provider="another"))
    assert list(tables.summary(table)["provider"]) == ["another", "mmcv", "reference"]
    assert list(tables.summary(table, ["reference", "mmcv"])["provider"]) == ["reference", "mmcv", "another"]
    assert list(tables.matrix(table, ["reference", "mmcv"])["provider"]) == ["reference", "mmcv", "another"]


@pytest.mark.parametrize(
    ("status", "ledger", "outcome"),
    [
        (Status.DEFECT, "", "defect"),
        (Status.DEFECT, "x", "defect"),
        (Status.CRASHED, "", "new crash"),
        (Status.CRASHED, "x", "known crash"),
        (Status.TIMED_OUT, "", "new timeout"),
        (Status.TIMED_OUT, "x", "known timeout"),
        (Status.OUT_OF_MEMORY, "", "new memory limit"),
        (Status.OUT_OF_MEMORY, "x", "known memory limit"),
        (Status.CONVENTION, "", "new convention"),
        (Status.CONVENTION, "x", "convention"),
        (Status.KNOWN, "x", "known"),
        *((status, "", str(status)) for status in Status if status not in tables.NEW),
    ],
)
def test_the_ledger_tells_new_from_known(tmp_path: Path, status: Status, ledger: str, outcome: str) -> None:
    table = table_of(tmp_path, mmcv(status=status, ledger=ledger), record())
    assert list(tables.outcomes(table)) == [outcome, "match"]
    assert outcome in tables.OUTCOMES
    verdict = tables.verdict(table, {})
    assert verdict.clean == (outcome not in tables.ALARMS)
    assert ("no new defect" in verdict.sentence) == verdict.clean
    found = tables.findings(table)
    assert [(finding.new, finding.counts) for finding in found] == (
        [(outcome in tables.ALARMS, {outcome: 1})] if outcome in tables.DIVERGENCES else []
    )


def test_every_class_of_the_suite_has_its_place() -> None:
    names = {*coordinates.BOUNDARIES, *roi_align.BOXES}
    plain = {name for name in names if not name.endswith(("_ulp", "_nano"))}
    assert {tables.boundary_group(name) for name in plain} == {""}
    assert "other" not in map(tables.boundary_group, names)
    groups = [tables.boundary_group(name) for name in coordinates.NEIGHBOURS]
    assert groups == ["one ulp beside a kink"] * 4 + ["1e-9 beside a kink"] * 4
    assert len({tables.boundary_rank(name)[:2] for name in names}) == len(names)
    assert sorted(coordinates.BOUNDARIES, key=tables.boundary_rank) == [
        *(*coordinates.CLASSES[:-1], "zero", "mixed", "non_finite", *coordinates.NEIGHBOURS),
    ]


def test_quantities_go_by_order_and_unknown_names_come_last() -> None:
    assert sorted(["zebra", "inside_edge_nano", "outside"], key=tables.boundary_rank) == [
        *("outside", "inside_edge_nano", "zebra"),
    ]
    assert tables.boundary_group("zebra") == "other"
    quantities = ["gradgrad:input", "grad:weight", "zebra", "grad:offset", "output", "grad:conv_offset.bias"]
    assert sorted(quantities, key=tables.quantity_rank) == [
        *("output", "grad:offset", "grad:weight", "grad:conv_offset.bias", "gradgrad:input", "zebra"),
    ]


def test_a_ledger_entry_is_one_finding_and_what_is_new_comes_first(tmp_path: Path) -> None:
    known = {"status": Status.KNOWN, "ledger": "x"}
    found = tables.findings(
        table_of(
            tmp_path,
            mmcv(case="a", err_over_bound=5.0, quantity="output", **known),
            mmcv(case="b", err_over_bound=9.0, quantity="grad:mask", boundary="edge_low", **known),
            mmcv(case="b", status=Status.CRASHED, ledger="x", err_over_bound=math.nan, quantity="grad:input"),
            mmcv(case="c", operator="roi_align", status=Status.CONVENTION, convention="closed", ledger="x"),
            mmcv(case="e", boundary="rim"),
            record(case="a", status=Status.KNOWN, ledger="y", version="1"),
            record(status=Status.DRIFT),
            record(status=Status.VACUOUS),
            record(status=Status.UNSUPPORTED),
            mmcv(case="a", status=Status.TIMED_OUT, err_over_bound=math.nan),
            record(case="a", status=Status.DEFECT),
        ),
        ["reference", "mmcv"],
    )
    assert [(each.ledger, each.provider, each.new, list(each.counts)) for each in found] == [
        ("", "reference", True, ["defect"]),
        ("", "mmcv", True, ["new timeout"]),
        ("", "reference", False, ["drift"]),
        ("y", "reference", False, ["known"]),
        ("x", "mmcv", False, ["known", "known crash", "convention"]),
    ]
    x = found[-1]
    assert (x.operators, x.quantities) == (
        ("deform_conv2d", "roi_align"),
        ("output", "grad:input", "grad:mask"),
    )
    assert (x.boundaries, x.asked) == (("interior", "edge_low"), ("interior", "rim", "edge_low"))
    assert (x.count, x.cases, x.err_over_bound) == (4, 3, 9.0)


def test_the_smallest_case_is_the_one_with_the_fewest_elements(tmp_path: Path) -> None:
    crash = {"status": Status.CRASHED, "ledger": "x", "elements": 0, "err_over_bound": math.nan}
    found = tables.findings(
        table_of(
            tmp_path,
            # A crash counts nothing; the size of its case is what the others computed.
            *(record(case=name, elements=size) for name, size in {"long-name": 5, "b": 7, "c": 5000}.items()),
            record(case="long-name", quantity="gradgrad:input", elements=100),
            *(mmcv(case=name, **crash) for name in ("c", "b", "long-name")),
            mmcv(case="long-name", quantity="grad:input", status=Status.KNOWN, ledger="x", elements=1),
        )
    )
    assert [(each.example["case"], each.example["quantity"]) for each in found] == [
        ("long-name", "grad:input"),
    ]


def test_equal_divergences_are_one_group_with_the_worst_record(tmp_path: Path) -> None:
    defect = {"status": Status.DEFECT}
    (found,) = tables.findings(
        table_of(
            tmp_path,
            mmcv(case="a", err_over_bound=5.0, **defect),
            mmcv(case="b", err_over_bound=9.0, elements=100, **defect),
            mmcv(case="c", err_over_bound=9.0, elements=4, dtype="float64", message="the smallest", **defect),
            mmcv(case="c", err_over_bound=math.nan, **defect),
            mmcv(case="a", quantity="grad:input", err_over_bound=99.0, **defect),
        )
    )
    assert list(found.groups["quantity"]) == ["grad:input", "output"]
    row = found.groups.iloc[1]
    assert (row["case"], row["message"], row["err_over_bound"]) == ("c", "the smallest", 9.0)
    assert (row["count"], row["cases"], row["dtypes"]) == (4, 3, "float32 3, float64 1")


@pytest.mark.parametrize("column", ["device", "question", "quantity", "boundary"])
def test_new_divergences_that_differ_in_one_thing_stay_apart(tmp_path: Path, column: str) -> None:
    one = mmcv(status=Status.DEFECT)
    other = mmcv(**{"status": Status.DEFECT, column: "another"})
    (found,) = tables.findings(table_of(tmp_path, one, other))
    assert len(found.groups) == 2


@pytest.mark.parametrize("column", ["provider", "version", "operator", "convention", "status"])
def test_findings_that_differ_in_one_thing_stay_apart(tmp_path: Path, column: str) -> None:
    one = mmcv(status=Status.DEFECT)
    other = Status.CRASHED if column == "status" else "another"
    found = tables.findings(table_of(tmp_path, one, mmcv(**{"status": Status.DEFECT, column: other})))
    assert len(found) == 2


def test_known_divergences_are_told_apart_by_quantity_and_not_by_boundary_class(tmp_path: Path) -> None:
    known = {"status": Status.KNOWN, "ledger": "x"}
    places = ("rim", "interior")
    (found,) = tables.findings(
        table_of(tmp_path, *(mmcv(boundary=place, **known) for place in places), mmcv(quantity="q", **known))
    )
    assert list(zip(found.groups["quantity"], found.groups["boundaries"], strict=True)) == [
        ("output", ("interior", "rim")),
        ("q", ("interior",)),
    ]


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
        "1 comparison of reference 0.1.0 on 1 case: no new defect; paddle, tvdcn took no part."
    )
    assert "tvdcn is not available: not built" in tables.not_compared(table, description())


def test_the_verdict_says_what_is_new_before_what_is_known(tmp_path: Path) -> None:
    known = {"ledger": "x", "provider": "mmcv", "version": "2.2.0"}
    records = [
        *(record(case=name) for name in "abc"),
        *(record(case=name, status=Status.VACUOUS, quantity="grad:bias") for name in "abz"),
        *(record(case=name, status=Status.KNOWN, **known) for name in "ab"),
        record(status=Status.CONVENTION, convention="closed", **known),
        record(status=Status.CRASHED, **known),
    ]
    said = {"providers": [{"name": "reference"}, {"name": "mmcv"}]}
    clean = tables.verdict(table_of(tmp_path, *records), said)
    assert clean == tables.Verdict(
        "6 comparisons of reference 0.1.0, mmcv 2.2.0 on 4 cases: no new defect; 2 known divergences, "
        "1 under another convention, 1 known crash; 3 tested nothing but zeros.",
        True,
    )
    new = [
        *(mmcv(status=Status.CRASHED, case=name) for name in "ab"),
        mmcv(status=Status.DEFECT),
        record(status=Status.DEFECT),
        mmcv(status=Status.TIMED_OUT),
        mmcv(status=Status.CONVENTION, convention="closed"),
    ]
    alarm = tables.verdict(table_of(tmp_path, *records, *new), said)
    assert not alarm.clean
    assert alarm.sentence == (
        "9 comparisons of reference 0.1.0, mmcv 2.2.0 on 4 cases: 2 new defects in mmcv 2.2.0 (1), "
        "reference 0.1.0 (1); 2 new crashes in mmcv 2.2.0; 1 new timeout in mmcv 2.2.0; 1 new case of another "
        "convention in mmcv 2.2.0; 2 known divergences, 1 under another convention, 1 known crash; "
        "3 tested nothing but zeros."
    )


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


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (Status.UNSUPPORTED, "Nothing was compared."),
        (Status.VACUOUS, "Nothing was compared: 1 tested nothing but zeros."),
        (Status.CRASHED, "Nothing was compared: 1 new crash in reference 0.1.0."),
    ],
)
def test_a_run_that_compared_nothing_is_not_clean(tmp_path: Path, status: Status, said: str) -> None:
    assert tables.verdict(table_of(tmp_path), {}) == tables.Verdict("Nothing was compared.", False)
    assert tables.verdict(table_of(tmp_path, record(status=status)), {}) == tables.Verdict(said, False)
