"""The oracle of roi_align_rois_grad against explicit sums, of first order, and finite differences, of both."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_oracle_roi_align import assert_oracle_is_explicit
from torch import Tensor

from cases.coordinates import SMOOTH
from cases.operator import Arithmetic
from cases.operators.roi_align import BOXES, bin_samples
from cases.operators.roi_align_rois_grad import OPERATOR, RoIAlignRoisGradCase
from conformance.expectation import Expectation

SMALL = RoIAlignRoisGradCase(dtype="float64", size=(4, 5), channels=2, rois=5)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("boxes", BOXES)
def test_boxes(boxes: str, aligned: bool) -> None:
    for data in ("real", "integer"):
        expectation = assert_oracle_is_explicit(
            dataclasses.replace(SMALL, boxes=boxes, aligned=aligned, data=data)
        )
        assert not expectation.gradients("closed")["grad:rois"].value[:, 0].any()


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
@pytest.mark.parametrize("aligned", [True, False])
def test_grids_and_scales(sampling_ratio: int, scale: int, aligned: bool) -> None:
    changed = {"sampling_ratio": sampling_ratio, "scale": scale, "aligned": aligned, "output_size": (3, 2)}
    for boxes in ("interior", "beyond", "one_pixel", "empty", "inverted"):
        case = dataclasses.replace(SMALL, dtype="float32", boxes=boxes, **changed)  # type: ignore[arg-type]
        assert_oracle_is_explicit(case)


@pytest.mark.parametrize("boxes", SMOOTH)
@pytest.mark.parametrize("aligned", [True, False])
def test_both_orders_are_finite_differences(boxes: str, aligned: bool) -> None:
    case = dataclasses.replace(SMALL, boxes=boxes, aligned=aligned, rois=2)
    assert OPERATOR.smooth(case)
    expectation = Expectation(case)
    leaves = [expectation.inputs[name].clone().requires_grad_() for name in ("input", "rois")]

    def oracle(image: Tensor, rois: Tensor) -> Tensor:
        tensors = OPERATOR.pin({"input": image, "rois": rois})
        return OPERATOR.oracle(case, tensors, Arithmetic.SIGNED, "closed")

    assert torch.autograd.gradcheck(oracle, leaves)
    assert torch.autograd.gradgradcheck(oracle, leaves)
    second = expectation.double_backward("closed")
    assert boxes == "outside" or bool(second["gradgrad:rois"].value.any())
    for each in second.values():
        assert bool((each.majorant >= each.value.abs() * (1 - 1e-12)).all())


@pytest.mark.parametrize("aligned", [True, False])
def test_inexact_samples_keep_clear_of_kinks(aligned: bool) -> None:
    for boxes in ("interior", "beyond", "rim", "one_pixel"):
        case = dataclasses.replace(SMALL, boxes=boxes, aligned=aligned, rois=20, size=(7, 9))
        for roi in OPERATOR.sample(case)["rois"]:
            for axis in (0, 1):
                y = bin_samples(case, roi, axis).positions
                y = y[(y > -0.5) & (y < case.size[axis] - 0.5)]
                assert np.abs(y - np.round(y)).min(initial=1) > 1e-3


@pytest.mark.parametrize(
    ("top", "bottom", "expected"),
    [
        (-1.0, 0.0, [0, 0]),  # y = -0.5 is clamped
        (-0.5, 0.5, [1, 1]),  # y = 0 is in the first cell
        (0.5, 1.5, [2, 2]),  # y = 1: the cell to the right
        (1.5, 2.5, [0, 0]),  # y = 2, the last pixel
        (2.0, 3.0, [0, 0]),  # beyond it
    ],
)
def test_slopes_at_kinks(top: float, bottom: float, expected: list[float]) -> None:
    case = RoIAlignRoisGradCase(
        dtype="float64",
        batch=1,
        channels=1,
        size=(3, 1),
        rois=1,
        output_size=(1, 1),
        sampling_ratio=1,
        aligned=False,
    )
    image = torch.tensor([1.0, 3.0, 7.0]).double().reshape(1, 1, 3, 1)
    rois = torch.tensor([[0, -0.5, top, 0.5, bottom]]).double().requires_grad_()
    pooled = OPERATOR.oracle(case, {"input": image, "rois": rois}, Arithmetic.SIGNED, "closed")
    (grad,) = torch.autograd.grad(pooled.sum(), rois)
    assert grad[0, [2, 4]].tolist() == [slope * 1.0 for slope in expected]
    assert not grad[0, [0, 1, 3]].any()


def test_a_widened_box_moves_with_its_first_corner() -> None:
    case = RoIAlignRoisGradCase(
        dtype="float64",
        batch=1,
        channels=1,
        size=(4, 1),
        rois=1,
        output_size=(1, 1),
        sampling_ratio=1,
        aligned=False,
    )
    image = torch.tensor([1.0, 3.0, 7.0, 15.0]).double().reshape(1, 1, 4, 1)
    for size, expected in ((0.25, [4.0, 0.0]), (1.5, [2.0, 2.0])):
        rois = torch.tensor([[0, -0.5, 1.0, 0.5, 1.0 + size]]).double().requires_grad_()
        pooled = OPERATOR.oracle(case, {"input": image, "rois": rois}, Arithmetic.SIGNED, "closed")
        (grad,) = torch.autograd.grad(pooled.sum(), rois)
        assert grad[0, [2, 4]].tolist() == expected


def test_roundings_counted_by_hand() -> None:
    # Three channels of 2x3 bins with 2x2 samples of four pixels, for one corner of one box.
    assert Expectation(RoIAlignRoisGradCase()).roundings["grad:rois"] == 7 + 8 + 3 * 6 * 4 * 4
