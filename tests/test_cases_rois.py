"""Boxes have what their class promises, and keep clear of what rounding could decide."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases.operator import all_operators
from cases.operators.roi_pool import FARTHEST, RoIPoolCase, rounded_corners
from cases.rois import CLEARANCE, VOIDING_BOXES, RoICase, RoIOperator
from conformance.test_gradcheck import asks

OPERATORS: dict[str, Any] = {
    name: operator for name, operator in all_operators().items() if isinstance(operator, RoIOperator)
}
ROUNDED = [name for name in OPERATORS if name.endswith("roi_pool")]


def draw(name: str, **axes: Any) -> tuple[RoICase, Tensor]:
    """A case of an operator, and its boxes in pixels, (K, 4)."""
    case = OPERATORS[name].case_type(**{"rois": 20, **axes})
    return case, OPERATORS[name].sample(case)["rois"][:, 1:].double() * case.spatial_scale


def test_there_are_six_operators_on_boxes() -> None:
    assert len(OPERATORS) == 6
    assert len(ROUNDED) == 2


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("scale", [1, 4])
def test_halves_of_both_signs(name: str, scale: int) -> None:
    _, corners = draw(name, boxes="half", scale=scale)
    halves = corners[(corners - corners.floor()) == 0.5]
    assert len(halves) >= 20
    assert bool((halves < 0).any())
    assert bool((halves > 0).any())


@pytest.mark.parametrize("name", ROUNDED)
def test_just_below_a_half_is_rounded_down_in_float64_only(name: str) -> None:
    case, corners = draw(name, boxes="below_half_nano", dtype="float64")
    below = corners[((corners - corners.floor()) - 0.5).abs() < 1e-6]
    assert len(below) >= 20
    assert bool((below != below.round(decimals=1)).all())
    assert bool((below.float().frac().abs() == 0.5).all())
    assert case.dtype == "float64"


@pytest.mark.parametrize("name", ROUNDED)
def test_boxes_touch_the_last_row_and_column(name: str) -> None:
    case, corners = draw(name, boxes="last_pixel")
    for axis, length in enumerate(case.size):
        ends = corners[:, 3 - axis]
        assert bool((ends == length - 1).any())
        assert bool((ends == length).any())


@pytest.mark.parametrize("name", ROUNDED)
def test_huge_boxes_are_farther_than_corners_count(name: str) -> None:
    case, corners = draw(name, boxes="huge")
    assert bool((corners.abs() > 2 * FARTHEST).any())
    roi = torch.tensor([0, -1e30, -1e30, 1e30, 1e30], dtype=torch.float64)
    assert rounded_corners(case, roi, 0) == (-FARTHEST, FARTHEST)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_scale_that_rounds_keeps_clear_of_halves(name: str, dtype: str) -> None:
    for boxes in ("interior", "beyond", "one_pixel", "rim", "inverted"):
        _, corners = draw(name, boxes=boxes, scale=3, dtype=dtype)
        assert bool(((corners.abs().frac() - 0.5).abs() > CLEARANCE * 0.99).all())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("boxes", VOIDING_BOXES)
def test_not_every_box_comes_to_nothing(name: str, boxes: str) -> None:
    case, corners = draw(name, boxes=boxes, size=(7, 9))
    if boxes == "non_finite":
        assert not bool(corners[:-1].isfinite().all(1).any())
    last = corners[-1]
    assert bool((last > 0).all())
    assert last[2] > last[0]
    assert last[3] > last[1]
    assert last[0] < case.size[1] - 1
    assert last[1] < case.size[0] - 1


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs_are_laid_out_and_of_the_dtype(name: str) -> None:
    operator = OPERATORS[name]
    case = operator.case_type(dtype="bfloat16", layout="sliced", grad_layout="transposed")
    tensors = operator.sample(case)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["input"].shape == (2, case.in_channels, 7, 9)
    assert tensors["input"].stride(-1) == 2
    assert operator.cotangent(case, torch.zeros(4, 3, 2, 3)).stride()[-2:] == (1, 2)


@pytest.mark.parametrize("name", OPERATORS)
def test_negative_images_are_below_every_starting_value_of_a_maximum(name: str) -> None:
    image = OPERATORS[name].sample(OPERATORS[name].case_type(data="negative"))["input"]
    assert -30000 <= float(image.min()) < float(image.max()) < -10000


def test_finite_differences_are_asked_of_smooth_cases_only() -> None:
    small = {"dtype": "float64", "rois": 2, "size": (4, 5), "channels": 1}
    for name in OPERATORS:
        assert asks(OPERATORS[name].case_type(**small))
        ties_or_kinks = name in ("roi_pool", "roi_align_max", "roi_align_rois_grad")
        assert asks(OPERATORS[name].case_type(**small, data="integer")) != ties_or_kinks
        assert not asks(OPERATORS[name].case_type(**small, boxes="last_pixel"))


def test_a_batch_index_is_out_of_a_gradients_reach() -> None:
    rois = torch.tensor([[1 - 1e-6, 1, 2, 3, 4]], dtype=torch.float64, requires_grad=True)
    pinned = OPERATORS["roi_align_rois_grad"].pin({"rois": rois})["rois"]
    assert pinned[0].tolist() == [1, 1, 2, 3, 4]
    (grad,) = torch.autograd.grad(pinned.sum(), rois)
    assert grad[0].tolist() == [0, 1, 1, 1, 1]


def test_position_sensitive_inputs_have_a_channel_per_bin() -> None:
    for name, operator in OPERATORS.items():
        channels = operator.case_type(channels=2, output_size=(2, 3)).in_channels
        assert channels == (12 if name.startswith("ps_") else 2)


def test_uneven_lengths_are_drawn_without_an_image_that_large() -> None:
    case = dataclasses.replace(RoIPoolCase(), boxes="uneven", output_size=(7, 7), rois=20)
    _, corners = draw("roi_pool", boxes="uneven", output_size=(7, 7))
    lengths = (corners[:, 3] - corners[:, 1]).numpy() + 1
    assert np.isin(57, lengths)
    assert max(case.size) < 57
