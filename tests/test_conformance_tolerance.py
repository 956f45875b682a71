"""Bounds and verdicts: what is wrong by more than the roundings explain fails, what they explain passes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from cases.dtypes import DTYPES, accumulation_dtype, unit_roundoff
from cases.operator import parse_case
from conformance.expectation import Expectation
from conformance.tolerance import MINIMUM_FOR_RMS, Expected, bound, rms_limit, ulp
from conformance.verdict import WORST_SHOWN, judge

CASES = (
    "deform_conv2d/dtype={},batch=3,groups=2",
    "roi_align/dtype={}",
    "modulated_deform_conv2d_pack/dtype={},offsets=mixed",
)
QUANTITIES = [
    (case_id.format(dtype).replace("dtype=float32,", "").replace("dtype=float32", "default"), dtype)
    for case_id in CASES
    for dtype in DTYPES
    if "pack" not in case_id or dtype in ("float64", "float32")
]


def expectations(case_id: str) -> Iterator[tuple[str, Expected]]:
    expectation = Expectation(parse_case(case_id))
    convention = expectation.operator.conventions[0]
    yield from expectation.output(convention).items()
    yield from expectation.gradients(convention).items()
    if not expectation.operator.is_module:
        yield from expectation.double_backward(convention).items()


def step_up(values: Tensor) -> Tensor:
    """The next larger numbers of the dtype, of positive ones."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    return (values.view(bits) + 1).view(values.dtype)


def at_distance(value: float, distance: float, dtype: torch.dtype, *, further: bool) -> Tensor:
    """A number of the dtype at least (or at most) that far above a positive value."""
    found = torch.tensor([value + distance], dtype=torch.float64).to(dtype)
    while further and float(found) - value < distance:
        found = step_up(found)
    if not further and float(found) - value > distance:
        found = torch.tensor([value], dtype=torch.float64).to(dtype)
    return found[0]


@pytest.mark.parametrize(("case_id", "dtype_name"), QUANTITIES)
def test_one_element_beyond_its_bound_is_caught(case_id: str, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    for quantity, expected in expectations(case_id):
        right = expected.value.to(dtype, copy=True)
        assert judge(right, expected, dtype).fault == "", quantity
        limit = bound(expected, dtype)
        positive = ((expected.value > 0) & (expected.majorant > 0)).nonzero()
        for index in map(tuple, positive[:: max(1, len(positive) // 3)].tolist()):
            for factor, further in ((2.0, True), (0.9, False)):
                got = right.clone()
                value, distance = float(expected.value[index]), factor * float(limit[index])
                got[index] = at_distance(value, distance, dtype, further=further)
                verdict = judge(got, expected, dtype)
                assert bool(verdict.fault) == further, (quantity, index, factor, verdict)
                if further:
                    assert verdict.worst[0].index == index
                    assert verdict.worst[0].got == float(got[index])
                    assert verdict.worst[0].expected == value
                    assert verdict.err_over_bound == verdict.worst[0].err_over_bound >= 2
                    assert "an element is off by" in verdict.fault


def test_the_bound_is_the_formula() -> None:
    expected = Expected(torch.tensor([-3.0, 0.0]).double(), torch.tensor([5.0, 0.0]).double(), roundings=7)
    u = {name: unit_roundoff(dtype) for name, dtype in DTYPES.items()}
    assert u == {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    for name, dtype in DTYPES.items():
        wide = 7 * u["float64" if name == "float64" else "float32"] * 5
        narrow = u[name] * (3 + wide) if dtype.itemsize == 2 else 0.0
        assert bound(expected, dtype).tolist() == [pytest.approx(wide + narrow, rel=1e-9), 0.0]


def test_a_result_that_underflows_may_be_off_by_the_smallest_number() -> None:
    tiny = torch.tensor([1e-9]).double()
    assert judge(tiny.half(), Expected(tiny, tiny, 7), torch.float16).fault == ""
    assert judge(torch.tensor([1e-7]).half(), Expected(tiny, tiny, 7), torch.float16).fault


def test_zero_bound_means_exactly_zero() -> None:
    zero, some = torch.zeros(4).double(), torch.tensor([0.0, 1, 1, 1]).double()
    for dtype in DTYPES.values():
        got = some.to(dtype, copy=True)
        assert judge(got, Expected(some, some, 9), dtype).fault == ""
        assert judge(-got, Expected(-some, some, 9), dtype).fault == ""
        got[0] = torch.finfo(dtype).tiny
        verdict = judge(got, Expected(some, some, 9), dtype)
        assert verdict.fault
        assert verdict.err_over_bound == math.inf
        assert verdict.worst[0].index == (0,)
        assert (verdict.elements, verdict.tested) == (4, 3)
        assert judge(zero.to(dtype), Expected(zero, zero, 9), dtype).tested == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_exact_data_are_compared_bit_for_bit(dtype: torch.dtype) -> None:
    value = torch.tensor([0.5, -2.25, 3.0, 0.0]).double()
    expected = Expected(value, value.abs(), roundings=1000, exact=True)
    assert judge(value.to(dtype), expected, dtype).fault == ""
    for index in range(3):
        got = value.to(dtype, copy=True)
        got[index] += torch.finfo(dtype).eps * got[index].abs() * (1 if index else 0.5) * 2
        assert got[index] != value[index].to(dtype)
        assert judge(got, expected, dtype).fault
        assert judge(got, Expected(value, value.abs(), 1000), dtype).fault == "" or dtype.itemsize == 2


def test_exact_data_get_the_one_rounding_of_their_dtype() -> None:
    value = torch.tensor([1 + 2.0**-10 + 2.0**-12]).double()
    expected = Expected(value, value, 5, exact=True)
    assert judge(value.half(), expected, torch.float16).fault == ""
    assert judge(value.to(torch.float32), expected, torch.float32).fault == ""
    assert judge(step_up(value.half()), expected, torch.float16).fault


@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_data_are_exact_as_claimed(dtype: str) -> None:
    # A sum in any order and precision of the accumulation dtype gives these values, so compare with one.
    case_id = f"deform_conv2d/dtype={dtype},data=integer,size=4x4,kernel=2x2,offsets=mixed"
    expectation = Expectation(parse_case(case_id.replace("dtype=float32,", "")))
    wide = accumulation_dtype(DTYPES[dtype])
    convention = "open"
    for quantity, expected in {**expectation.output(convention), **expectation.gradients(convention)}.items():
        assert expected.exact, quantity
        assert torch.equal(expected.value, expected.value.to(wide).double()), quantity
    for quantity, expected in expectation.double_backward(convention).items():
        assert torch.equal(expected.value, expected.value.to(wide).double()) or not expected.exact, quantity


def test_exactness_ends_where_the_accumulation_dtype_does() -> None:
    small, large = ("deform_conv2d/{}data=integer,batch={}", torch.float32), 2.0**-9
    expectation = Expectation(parse_case(small[0].format("", 1)))
    limit = large / unit_roundoff(torch.float32)
    assert expectation._is_exact(torch.tensor([limit * 0.99]))
    assert not expectation._is_exact(torch.tensor([limit]))
    assert not Expectation(parse_case("deform_conv2d/batch=1"))._is_exact(torch.tensor([1.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_a_fault_wherever_it_stands(bad: float) -> None:
    for dtype in DTYPES.values():
        for value in (1.0, 0.0):
            expected = Expected(torch.full((3,), value).double(), torch.full((3,), value).double(), 9)
            for exact in (False, True):
                got = expected.value.to(dtype, copy=True)
                got[1] = bad
                verdict = judge(got, Expected(expected.value, expected.majorant, 9, exact), dtype)
                assert verdict.fault
                assert verdict.err_over_bound == math.inf
                assert verdict.max_abs_error == math.inf
                assert verdict.worst[0].index == (1,)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_not_a_number_is_right_only_where_it_is_expected(dtype: torch.dtype) -> None:
    value, majorant = torch.tensor([math.nan, 0.5]).double(), torch.tensor([1.0, 0.5]).double()
    for exact in (False, True):
        expected = Expected(value, majorant, 3, exact=exact)
        assert judge(value.to(dtype), expected, dtype).fault == ""
        for wrong in ([0.5, 0.5], [math.inf, 0.5], [math.nan, math.nan]):
            assert judge(torch.tensor(wrong).to(dtype), expected, dtype).err_over_bound == math.inf


def test_missing_misshapen_and_mistyped_results_are_faults() -> None:
    expected = Expected(torch.ones(2, 3).double(), torch.ones(2, 3).double(), 9)
    assert judge(None, expected, torch.float32).fault == "there is none"
    assert judge((torch.ones(2, 3),), expected, torch.float32).fault == "it is a tuple, expected a tensor"
    assert judge(torch.ones(3, 2), expected, torch.float32).fault == "shape is (3, 2), expected (2, 3)"
    assert judge(torch.ones(1, 3), expected, torch.float32).fault
    wrong_dtype = judge(torch.ones(2, 3).double(), expected, torch.float32)
    assert wrong_dtype.fault == "dtype is torch.float64, expected torch.float32"
    assert wrong_dtype.elements == 6
    assert math.isnan(wrong_dtype.err_over_bound)
    empty = Expected(torch.ones(0, 3).double(), torch.ones(0, 3).double(), 9)
    assert judge(torch.ones(0, 3), empty, torch.float32).fault == ""
    assert judge(torch.ones(0, 2), empty, torch.float32).fault


def dot_products(terms: int, kind: type[np.floating], held: type[np.floating]) -> tuple[Tensor, Expected]:
    """Sums of products accumulated one after another in ``kind``, as ``held``, and what they should be."""
    random = np.random.default_rng(terms)
    a, b = (random.uniform(-1, 1, (200, terms)).astype(held) for _ in range(2))
    total = np.zeros(200, dtype=kind)
    for i in range(terms):
        total = total + a[:, i].astype(kind) * b[:, i].astype(kind)
    exact = (a.astype(np.longdouble) * b.astype(np.longdouble)).sum(1)
    majorant = np.abs(a.astype(np.float64) * b.astype(np.float64)).sum(1)
    expected = Expected(torch.tensor(exact.astype(np.float64)), torch.tensor(majorant), terms)
    return torch.tensor(total.astype(held)), expected


@pytest.mark.parametrize("terms", [9, 100, 1000])
def test_an_accumulator_of_too_low_a_precision_is_caught(terms: int) -> None:
    for right, wrong, dtype in (
        (np.float64, np.float32, torch.float64),
        (np.float32, np.float16, torch.float32),
    ):
        verdict = judge(*dot_products(terms, right, right), dtype)
        assert verdict.fault == ""
        assert verdict.rms_over_bound < 0.5
        verdict = judge(*dot_products(terms, wrong, right), dtype)
        assert verdict.fault
        assert verdict.rms_over_bound > 10


def test_the_root_mean_square_catches_what_hides_under_the_worst_case() -> None:
    value, roundings = torch.full((MINIMUM_FOR_RMS,), 1.0).double(), 400
    expected = Expected(value, 4 * value, roundings)
    got = (value + 0.5 * bound(expected, torch.float32)).float()
    verdict = judge(got, expected, torch.float32)
    assert verdict.err_over_bound < 0.6
    assert verdict.rms_over_bound == pytest.approx(0.5 * roundings / rms_limit(roundings), rel=0.01)
    assert verdict.fault.startswith("the root mean square error is 5 times")
    # Too few elements say nothing about a mean, and one element that is off leaves it alone.
    few = Expected(value[1:], 4 * value[1:], roundings)
    assert judge(got[1:], few, torch.float32).fault == ""
    got[1:] = 1
    assert judge(got, expected, torch.float32).fault == ""


def test_the_worst_elements_come_first() -> None:
    value = torch.ones(2, 5).double()
    expected = Expected(value, value, 3)
    got = value.float() + torch.arange(10).reshape(2, 5) * 1e-3
    verdict = judge(got, expected, torch.float32)
    assert [element.index for element in verdict.worst] == [(1, 4), (1, 3), (1, 2), (1, 1), (1, 0)]
    assert len(verdict.worst) == WORST_SHOWN
    assert verdict.max_abs_error == pytest.approx(9e-3, rel=1e-4)
    assert verdict.max_ulp_error == pytest.approx(9e-3 / 2**-23, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_ulp_is_the_spacing_of_the_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0.75, 1.0, 1.5, 2.0, 3.5, 200.0]).to(dtype)
    spacing = (step_up(values).double() - values.double()).tolist()
    assert ulp(values.double(), dtype).tolist() == spacing
    assert ulp(-values.double(), dtype).tolist() == spacing
    smallest = step_up(torch.zeros(1, dtype=dtype))
    assert ulp(smallest.double(), dtype).item() == smallest.item() > 0
