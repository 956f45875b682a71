"""The oracles of roi_pool and ps_roi_pool against explicit loops: two derivations, one answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from explicit import RoIPool
from test_oracle_roi_align import arrays

from cases.operator import Arithmetic
from cases.operators.ps_roi_pool import OPERATOR as MEAN
from cases.operators.ps_roi_pool import PSRoIPoolCase
from cases.operators.roi_pool import (
    BOXES,
    ROUNDED_BOXES,
    RoIPoolCase,
    bin_edges,
    rounded_corners,
    rounds_unevenly,
)
from cases.operators.roi_pool import OPERATOR as LARGEST
from cases.rois import RoICase
from conformance.expectation import Expectation

SMALL = RoIPoolCase(dtype="float64", size=(4, 5), channels=2, rois=5)
SMALL_MEAN = PSRoIPoolCase(dtype="float64", size=(4, 5), channels=2, rois=5)


def assert_oracle_is_explicit(case: RoICase) -> Expectation:
    expectation = Expectation(case)
    explicit = RoIPool(
        case.output_size,
        1 / case.scale,
        position_sensitive=isinstance(case, PSRoIPoolCase),
        kind=np.float64 if case.dtype == "float64" else np.float32,
    )
    image, rois, grad = arrays(expectation)
    signed = explicit(image, rois, grad)
    absolute = explicit(np.abs(image), rois, np.abs(grad))
    for quantity, oracle in {**expectation.output("closed"), **expectation.gradients("closed")}.items():
        np.testing.assert_allclose(oracle.value.numpy(), signed[quantity], rtol=1e-12, atol=1e-13)
        if isinstance(case, PSRoIPoolCase):
            np.testing.assert_allclose(oracle.majorant.numpy(), absolute[quantity], rtol=1e-12)
        elif quantity == "output":
            np.testing.assert_array_equal(
                oracle.majorant.numpy(), np.abs(np.nan_to_num(signed[quantity], nan=1))
            )
        else:
            # Of the pixels that the signed image chooses.
            chosen = explicit(image, rois, np.abs(grad))[quantity]
            np.testing.assert_allclose(oracle.majorant.numpy(), chosen, rtol=1e-12)
    return expectation


@pytest.mark.parametrize("boxes", BOXES)
@pytest.mark.parametrize("scale", [1, 4])
def test_boxes(boxes: str, scale: int) -> None:
    for dtype in ("float64", "float32"):
        case = dataclasses.replace(SMALL, dtype=dtype, boxes=boxes, scale=scale, output_size=(3, 7))
        if LARGEST.valid(case):
            assert_oracle_is_explicit(case)


@pytest.mark.parametrize("boxes", ROUNDED_BOXES)
@pytest.mark.parametrize("scale", [1, 4])
def test_boxes_of_the_mean(boxes: str, scale: int) -> None:
    for data in ("real", "integer"):
        case = dataclasses.replace(SMALL_MEAN, data=data, boxes=boxes, scale=scale, output_size=(3, 7))
        assert_oracle_is_explicit(case)


def test_a_scale_that_rounds() -> None:
    for boxes in ("interior", "beyond", "one_pixel", "inverted"):
        for small in (SMALL, SMALL_MEAN):
            assert_oracle_is_explicit(dataclasses.replace(small, dtype="float32", boxes=boxes, scale=3))


@pytest.mark.parametrize(
    ("coordinate", "pixel"),
    [
        (0.5, 1),
        (1.5, 2),
        (2.5, 3),
        (-0.5, -1),
        (-1.5, -2),
        (0.49999999999999994, 0),
        (2.499999999, 2),
        (1e12, 2**30),
    ],
)
def test_corners_are_rounded_half_away_from_zero(coordinate: float, pixel: int) -> None:
    roi = torch.tensor([0, coordinate, coordinate, coordinate, coordinate], dtype=torch.float64)
    assert rounded_corners(SMALL, roi, 0) == rounded_corners(SMALL, roi, 1) == (pixel, pixel)


def test_bins_divide_whole_numbers_exactly() -> None:
    # In floating point, 7 * (29 / 7) is more than 29, and 7 * (57 / 7) more than 57.
    for length, kind in ((29, np.float64), (57, np.float32)):
        assert bin_edges(length, 7)[-1][1] == length
        assert rounds_unevenly(length, 7, kind)
        assert not rounds_unevenly(28, 7, kind)
    assert bin_edges(5, 3) == [(0, 2), (1, 4), (3, 5)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("operator", "small"), [(LARGEST, SMALL), (MEAN, SMALL_MEAN)])
def test_uneven_boxes_tell_exact_division_from_rounded(operator: Any, small: Any, dtype: str) -> None:
    case = dataclasses.replace(small, dtype=dtype, boxes="uneven", output_size=(7, 7), rois=10)
    kind = np.float64 if dtype == "float64" else np.float32
    seen = 0
    for roi in operator.sample(case)["rois"]:
        for axis in (0, 1):
            first, last = rounded_corners(case, roi, axis) or (0, 0)
            length = last - first + int(operator.with_last)
            seen += rounds_unevenly(length, 7, kind) and 0 < first + length < case.size[axis]
    assert seen >= 5


def pooled(operator: Any, case: RoICase, pixels: list[list[float]], box: list[float]) -> tuple[Any, Any]:
    image = torch.tensor(pixels).double()[None, None].requires_grad_()
    tensors = {"input": image, "rois": torch.tensor([[0, *box]]).double()}
    output = operator.oracle(case, tensors, Arithmetic.SIGNED, "closed")
    (grad,) = torch.autograd.grad(output.sum(), image)
    return output.flatten().tolist(), grad[0, 0].tolist()


def test_the_first_of_equal_pixels_wins_and_a_nan_before_all() -> None:
    case = RoIPoolCase(dtype="float64", batch=1, channels=1, size=(2, 2), rois=1, output_size=(1, 1))
    whole: list[float] = [0, 0, 1, 1]
    assert pooled(LARGEST, case, [[1, 3], [3, 2]], whole) == ([3], [[0, 1], [0, 0]])
    values, grad = pooled(LARGEST, case, [[1, 3], [np.nan, np.nan]], whole)
    assert np.isnan(values).all()
    assert grad == [[0, 0], [1, 0]]


def test_the_last_row_and_column_belong_to_a_mean() -> None:
    case = PSRoIPoolCase(dtype="float64", batch=1, channels=1, size=(2, 2), rois=1, output_size=(1, 1))
    assert pooled(MEAN, case, [[1, 3], [3, 2]], [0, 0, 2, 2]) == ([2.25], [[0.25, 0.25], [0.25, 0.25]])


def test_an_empty_bin_is_zero_without_gradient() -> None:
    for operator, case_type in ((LARGEST, RoIPoolCase), (MEAN, PSRoIPoolCase)):
        case: Any = case_type(dtype="float64", batch=1, channels=1, size=(2, 2), rois=1, output_size=(1, 1))
        for box in ([5.0, 5, 6, 6], [np.nan, 0, 1, 1], [0, 0, np.inf, 1]):
            assert pooled(operator, case, [[1, 3], [3, 2]], box) == ([0], [[0, 0], [0, 0]])


def test_integer_data_is_judged_bit_for_bit() -> None:
    for case in (RoIPoolCase(data="integer"), PSRoIPoolCase(data="integer")):
        expectation = Expectation(case)
        for each in (*expectation.output("closed").values(), *expectation.gradients("closed").values()):
            assert each.exact


def test_a_mean_over_three_pixels_is_not_exact() -> None:
    case = PSRoIPoolCase(data="integer", rois=8, boxes="half")
    areas = {int(area) for roi in MEAN.sample(case)["rois"] for area in MEAN.areas(case, roi).flatten()}
    assert areas & {3, 6, 9}
    assert not Expectation(case).output("closed")["output"].exact


def test_nan_pixels_are_in_some_bins_and_not_in_all() -> None:
    output = Expectation(RoIPoolCase(boxes="nan_pixels")).output("closed")["output"].value
    assert bool(output.isnan().any())
    assert bool(output.isfinite().any())


def test_roundings_counted_by_hand() -> None:
    assert Expectation(RoIPoolCase()).roundings == {"output": 1, "grad:input": 4 * 6}
    case = PSRoIPoolCase(rois=2)
    largest = max(int(MEAN.areas(case, roi).max()) for roi in MEAN.sample(case)["rois"])
    assert Expectation(case).roundings == {"output": largest + 1, "grad:input": 3}
