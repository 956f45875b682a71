"""What the bench books for each way in which a provider can answer."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.operator import Arithmetic, all_operators, parse_case
from cases.operators.deform_conv2d import DeformConv2dCase
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.isolation import DEFAULT_LIMITS, GIBIBYTE, Limits
from conformance.ledger import KINDS, Entry, Ledger
from conformance.providers.registry import Loaded
from conformance.subject import Subject
from reports.record import Record, Status

CASE = "deform_conv2d/dtype=float64,batch=1,in_channels=2,out_channels=2,size=3x4,kernel=1x2,offsets={}"
EDGE, INTERIOR, NON_FINITE = map(CASE.format, ("edge_low", "zero", "non_finite"))
SMOOTH = CASE.removesuffix(",offsets={}")
Operator = Callable[..., Tensor]


class Fake:
    """A provider of one operator, given as a function."""

    name = "fake"

    def __init__(self, operator: Operator, *, promises_everything: bool = False) -> None:
        self.deform_conv2d = operator
        self.promises_everything = promises_everything

    def load(self) -> str:
        return "1.0"


def oracle(case_id: str, convention: str = "open") -> Operator:
    """The case's own oracle as an implementation."""
    case = parse_case(case_id)
    assert isinstance(case, DeformConv2dCase)

    def deform_conv2d(input: Tensor, offset: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        optional = {name: rest[name] for name in ("bias", "mask") if rest[name] is not None}
        tensors = {"input": input, "offset": offset, "weight": weight, **optional}
        return all_operators()["deform_conv2d"].oracle(case, tensors, Arithmetic.SIGNED, convention)

    return deform_conv2d


def raising(error: BaseException) -> Operator:
    def deform_conv2d(**_: Any) -> Tensor:
        raise error

    return deform_conv2d


def entry(quantity: str = "*", provider: str = "fake", kind: str = "defect") -> Entry:
    return Entry(
        "known", provider, ">=0", "deform_conv2d", quantity, kind, "It is known.", "", EDGE, condition=()
    )


def ask(
    operator: Operator,
    case_id: str = SMOOTH,
    *,
    question: str = "output",
    ledger: tuple[Entry, ...] = (),
    promises_everything: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    isolated: bool = False,
) -> tuple[dict[str, Record], list[str]]:
    """The records by quantity, and what the ledger does not know."""
    records: list[Record] = []
    provider = Fake(operator, promises_everything=promises_everything)
    loaded = Loaded(provider, version="1.0", isolated=isolated)
    desk = Bench([loaded], Ledger(ledger), records.append, limits)
    compute, expect = {
        "output": (Subject.output, Expectation.output),
        "gradients": (Subject.gradients, Expectation.gradients),
        "double_backward": (Subject.double_backward, Expectation.double_backward),
    }[question]
    unknown = desk.compare(question, parse_case(case_id), compute, expect)
    return {record.quantity: record for record in records}, unknown


@pytest.mark.parametrize("question", ["output", "gradients", "double_backward"])
def test_the_oracle_matches_itself(question: str) -> None:
    records, unknown = ask(oracle(SMOOTH), question=question)
    assert unknown == []
    assert records
    for quantity, record in records.items():
        vacuous = quantity == "gradgrad:bias"
        assert record.status is (Status.VACUOUS if vacuous else Status.MATCH), quantity
        assert record.question == question
        assert (record.provider, record.version, record.operator) == ("fake", "1.0", "deform_conv2d")
        assert (record.case, record.dtype, record.boundary) == (SMOOTH, "float64", "interior")
        assert vacuous or 0 < record.tested <= record.elements
        assert record.seconds >= 0


def test_a_wrong_value_is_a_defect_unless_the_ledger_knows_it() -> None:
    def off(**tensors: Any) -> Tensor:
        wrong = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
        wrong[0, 1, 2, 3] = 1e-6
        return oracle(SMOOTH)(**tensors) + wrong

    records, unknown = ask(off)
    output = records["output"]
    assert output.status is Status.DEFECT
    assert output.err_over_bound > 1
    assert output.worst[0].index == (0, 1, 2, 3)
    assert output.worst[0].samples
    assert len(unknown) == 1
    assert unknown[0].startswith("fake 1.0: output defect an element is off by")
    records, unknown = ask(off, ledger=(entry(),))
    assert records["output"].status is Status.KNOWN
    assert records["output"].ledger == "known"
    assert unknown == []
    for elsewhere in (entry(provider="other"), entry(quantity="grad:*")):
        records, unknown = ask(off, ledger=(elsewhere,))
        assert (records["output"].status, len(unknown)) == (Status.DEFECT, 1)


def test_a_convention_is_told_apart_and_needs_the_ledger() -> None:
    records, unknown = ask(oracle(EDGE, "closed"), EDGE, question="gradients")
    offset = records["grad:offset"]
    assert (offset.status, offset.convention, offset.ledger) == (Status.CONVENTION, "closed", "")
    assert offset.worst
    assert all("edge_low" in where for each in offset.worst for _, _, where in each.samples)
    others = {record.status for quantity, record in records.items() if quantity != "grad:offset"}
    assert others <= {Status.MATCH, Status.VACUOUS}
    assert unknown == ["fake 1.0: grad:offset convention closed"]
    records, unknown = ask(
        oracle(EDGE, "closed"), EDGE, question="gradients", ledger=(entry(kind="convention"),)
    )
    offset = records["grad:offset"]
    assert (offset.status, offset.convention, offset.ledger) == (Status.CONVENTION, "closed", "known")
    assert unknown == []


def test_the_standard_convention_is_no_convention() -> None:
    records, unknown = ask(oracle(EDGE), EDGE, question="gradients")
    assert unknown == []
    assert {record.convention for record in records.values()} == {""}
    assert records["grad:offset"].status is Status.MATCH


@pytest.mark.parametrize("promises_everything", [False, True])
def test_a_refusal_is_unsupported_except_from_who_promises(promises_everything: bool) -> None:
    refusal = raising(RuntimeError("im2col_step must divide\nC++ trace"))
    records, unknown = ask(refusal, question="gradients", promises_everything=promises_everything)
    assert set(records) == {f"grad:{name}" for name in ("input", "offset", "weight", "bias", "mask")}
    expected = Status.DEFECT if promises_everything else Status.UNSUPPORTED
    assert {record.status for record in records.values()} == {expected}
    assert {record.message for record in records.values()} == {
        "RuntimeError: im2col_step must divide C++ trace"
    }
    assert len(unknown) == (5 if promises_everything else 0)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("dim >= 0 INTERNAL ASSERT FAILED at a.cpp:3, please report a bug"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("vector::_M_range_check std::out_of_range"),
        MemoryError(),
        MemoryError("of 3 TB"),
        IndexError("list index out of range"),
        AttributeError("'NoneType' object has no attribute 'shape'"),
        SystemError("error return without exception set"),
    ],
    ids=repr,
)
def test_an_exception_about_the_insides_is_a_defect(error: Exception) -> None:
    records, unknown = ask(raising(error))
    assert records["output"].status is Status.DEFECT
    assert len(unknown) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("expected weight to be contiguous"),
        NotImplementedError("bfloat16"),
        RuntimeError("got AttributeError-like text"),
    ],
    ids=repr,
)
def test_an_exception_about_the_case_is_a_refusal(error: Exception) -> None:
    records, unknown = ask(raising(error))
    assert records["output"].status is Status.UNSUPPORTED
    assert records["output"].message == f"{type(error).__name__}: {error}"
    assert unknown == []


@pytest.mark.parametrize("promises_everything", [False, True])
def test_a_missing_operator_is_unsupported_even_of_who_promises(promises_everything: bool) -> None:
    provider = Fake(oracle(SMOOTH), promises_everything=promises_everything)
    records: list[Record] = []
    desk = Bench([Loaded(provider, version="1.0")], Ledger([]), records.append)
    unknown = desk.compare("output", parse_case("roi_align/default"), Subject.output, Expectation.output)
    assert unknown == []
    assert [record.status for record in records] == [Status.UNSUPPORTED]
    assert records[0].message == "fake has no roi_align"


def test_an_unavailable_provider_is_not_asked() -> None:
    desk = Bench([Loaded(Fake(oracle(SMOOTH)), unavailable="not installed")], Ledger([]), lambda record: None)
    assert desk.providers == []


def test_a_gradient_that_is_missing_is_a_defect() -> None:
    def without_mask(mask: Tensor, **tensors: Any) -> Tensor:
        return oracle(SMOOTH)(mask=mask.detach(), **tensors)

    records, unknown = ask(without_mask, question="gradients")
    assert records["grad:mask"].status is Status.DEFECT
    assert records["grad:mask"].message == "there is none"
    assert records["grad:input"].status is Status.MATCH
    assert unknown == ["fake 1.0: grad:mask defect there is none"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out[:, :1], r"shape is \(1, 1, 5, 5\), expected \(1, 2, 5, 5\)"),
        (lambda out: out.float(), "dtype is torch.float32, expected torch.float64"),
        (lambda out: out * float("nan"), "an element is off by inf times its bound"),
        (lambda out: (out,), "it is a tuple, expected a tensor"),
    ],
    ids=["shape", "dtype", "nan", "tuple"],
)
def test_a_result_of_another_kind_is_a_defect(change: Callable[[Tensor], Any], message: str) -> None:
    records, unknown = ask(lambda **tensors: change(oracle(SMOOTH)(**tensors)))
    assert records["output"].status is Status.DEFECT
    assert re.fullmatch(message, records["output"].message)
    assert len(unknown) == 1


def test_a_case_that_tests_nothing_is_no_match() -> None:
    empty = SMOOTH.replace("batch=1", "batch=0")
    records, unknown = ask(oracle(empty), empty)
    assert records["output"].status is Status.VACUOUS
    assert records["output"].tested == 0
    assert unknown == []


def crash(**_: Any) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError


def hang(**_: Any) -> Tensor:
    time.sleep(60)
    raise AssertionError


def test_a_hostile_case_may_kill_its_process() -> None:
    records, unknown = ask(crash, NON_FINITE)
    assert records["output"].status is Status.CRASHED
    assert records["output"].message == "the process died of SIGSEGV"
    assert len(unknown) == 1
    records, unknown = ask(crash, NON_FINITE, ledger=(entry(kind="crash"),))
    assert (records["output"].status, records["output"].ledger, unknown) == (Status.CRASHED, "known", [])

    records, unknown = ask(hang, NON_FINITE, limits=Limits(time_s=0.2))
    assert records["output"].status is Status.TIMED_OUT
    assert len(unknown) == 1


def hoard(**_: Any) -> Tensor:
    return torch.ones(GIBIBYTE)


def test_an_isolated_provider_may_die_on_any_case() -> None:
    for operator, status in (
        (crash, Status.CRASHED),
        (hang, Status.TIMED_OUT),
        (hoard, Status.OUT_OF_MEMORY),
    ):
        records, unknown = ask(operator, isolated=True, limits=Limits(time_s=2, memory=GIBIBYTE // 4))
        assert records["output"].status is status
        assert len(unknown) == 1
    records, unknown = ask(oracle(SMOOTH), isolated=True)
    assert (records["output"].status, unknown) == (Status.MATCH, [])


def test_a_hostile_case_is_otherwise_like_every_other() -> None:
    records, unknown = ask(oracle(NON_FINITE), NON_FINITE, question="gradients")
    assert {record.status for record in records.values()} <= {Status.MATCH, Status.VACUOUS}
    assert records["grad:offset"].status is Status.MATCH
    assert unknown == []
    records, _ = ask(raising(ValueError("offset is not finite")), NON_FINITE)
    assert records["output"].status is Status.UNSUPPORTED
    assert records["output"].message == "ValueError: offset is not finite"
    records, _ = ask(raising(IndexError("out of range")), NON_FINITE)
    assert records["output"].status is Status.DEFECT


@pytest.mark.parametrize("case_id", [SMOOTH, NON_FINITE], ids=["here", "isolated"])
def test_a_check_books_its_fault(case_id: str) -> None:
    def check(fault: str, *ledger: Entry) -> tuple[Record, list[str]]:
        records: list[Record] = []
        desk = Bench([Loaded(Fake(oracle(case_id)), version="1.0")], Ledger(ledger), records.append)
        unknown = desk.check("gradcheck", parse_case(case_id), lambda subject: fault)
        (record,) = records
        return record, unknown

    record, unknown = check("")
    assert (record.status, record.quantity, unknown) == (Status.MATCH, "gradcheck", [])
    record, unknown = check("Jacobian mismatch")
    assert (record.status, record.message) == (Status.DEFECT, "Jacobian mismatch")
    assert unknown == ["fake 1.0: gradcheck defect Jacobian mismatch"]
    record, unknown = check("Jacobian mismatch", entry(quantity="gradcheck"))
    assert (record.status, unknown) == (Status.KNOWN, [])


@pytest.mark.parametrize(
    ("operator", "case_id", "kinds"),
    [
        (oracle(EDGE, "closed"), EDGE, ("convention",)),
        (lambda **tensors: 2 * oracle(EDGE)(**tensors), EDGE, ("defect", "crash")),
        (crash, NON_FINITE, ("crash",)),
    ],
    ids=["convention", "defect", "crash"],
)
def test_the_ledger_excuses_only_what_it_speaks_of(
    operator: Operator, case_id: str, kinds: tuple[str, ...]
) -> None:
    for kind in KINDS:
        _, unknown = ask(operator, case_id, question="gradients", ledger=(entry(kind=kind),))
        assert bool(unknown) == (kind not in kinds)
