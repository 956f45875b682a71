"""The oracle of roi_align_max against explicit loops, and images in which every bin has a winner."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_oracle_roi_align import arrays, explicit

from cases.operator import Arithmetic
from cases.operators.roi_align import BOXES, bin_samples, is_exact
from cases.operators.roi_align_max import OPERATOR, RoIAlignMaxCase, sample_values
from conformance.expectation import Expectation
from conformance.tolerance import bound

SMALL = RoIAlignMaxCase(dtype="float64", size=(4, 5), channels=2, rois=5)
ONE = RoIAlignMaxCase(
    dtype="float64", batch=1, channels=1, size=(1, 4), rois=1, output_size=(1, 1), sampling_ratio=2
)


def assert_oracle_is_explicit(case: RoIAlignMaxCase) -> Expectation:
    expectation = Expectation(case)
    expected = explicit(case).maximum(*arrays(expectation))
    for quantity, oracle in {**expectation.output("closed"), **expectation.gradients("closed")}.items():
        scale = np.abs(expected[quantity]).max(initial=1)
        np.testing.assert_allclose(oracle.value.numpy(), expected[quantity], rtol=1e-11, atol=1e-12 * scale)
        assert bool((oracle.majorant >= oracle.value.abs() * (1 - 1e-12)).all())
    return expectation


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("boxes", BOXES)
def test_boxes(boxes: str, aligned: bool) -> None:
    for data in ("real", "integer", "negative"):
        assert_oracle_is_explicit(dataclasses.replace(SMALL, boxes=boxes, aligned=aligned, data=data))


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
def test_grids_and_scales(sampling_ratio: int, scale: int) -> None:
    for boxes in ("interior", "beyond", "one_pixel", "empty"):
        changed = {"boxes": boxes, "sampling_ratio": sampling_ratio, "scale": scale, "output_size": (3, 2)}
        assert_oracle_is_explicit(dataclasses.replace(SMALL, dtype="float32", **changed))  # type: ignore[arg-type]


def gradient(pixels: list[float], box: list[float]) -> tuple[float, list[float]]:
    image = torch.tensor(pixels).double().reshape(1, 1, 1, 4).requires_grad_()
    tensors = {"input": image, "rois": torch.tensor([[0, *box]]).double()}
    pooled = OPERATOR.oracle(ONE, tensors, Arithmetic.SIGNED, "closed")
    (grad,) = torch.autograd.grad(pooled.sum(), image)
    return pooled.item(), grad.flatten().tolist()


def test_the_first_of_equal_samples_gets_the_whole_gradient() -> None:
    # Samples at x = 0 and x = 2 of a row, and both rows of the grid fall on the only one of the image.
    assert gradient([5, 9, 5, 1], [-0.5, 0, 3.5, 1]) == (5, [1, 0, 0, 0])
    assert gradient([5, 9, 6, 1], [-0.5, 0, 3.5, 1]) == (6, [0, 0, 1, 0])


def test_a_sample_outside_counts_as_zero() -> None:
    # Samples at x = -3 and x = 1.
    assert gradient([-5, -9, -5, -1], [-4.5, 0, 3.5, 1]) == (0, [0, 0, 0, 0])
    assert gradient([-5, 9, -5, -1], [-4.5, 0, 3.5, 1]) == (9, [0, 1, 0, 0])


@pytest.mark.parametrize("data", ["real", "integer", "negative"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_no_rounding_decides_a_bin(dtype: str, data: str) -> None:
    case = RoIAlignMaxCase(
        dtype=dtype, data=data, rois=20, output_size=(7, 7), sampling_ratio=3, aligned=False
    )
    expectation = Expectation(case)
    image, rois = (expectation.inputs[name].double() for name in ("input", "rois"))
    limit = bound(
        expectation.output("closed")["output"], torch.float32 if dtype == "bfloat16" else image.dtype
    )
    checked = 0
    for number, roi in enumerate(rois):
        if is_exact(case, roi):
            continue
        values = sample_values(case, roi, image[int(roi[0])], Arithmetic.SIGNED)
        top = values.sort(-1, descending=True)[0]
        # No two samples of such boxes read the same place, so that the second is another one.
        assert all(len(np.unique(bin_samples(case, roi, axis).positions)) == 21 for axis in (0, 1))
        interior = [
            bool(
                ((p := bin_samples(case, roi, axis).positions) > 0).all() and (p < case.size[axis] - 1).all()
            )
            for axis in (0, 1)
        ]
        if all(interior):
            checked += values.shape[0] * 49
            assert bool((top[..., 0] - top[..., 1] > limit[number]).all())
    assert checked > 100 or data == "integer"


def test_exact_samples_may_be_equal() -> None:
    case = RoIAlignMaxCase(data="integer", rois=20, sampling_ratio=2, boxes="integer")
    image, rois = (OPERATOR.sample(case)[name].double() for name in ("input", "rois"))
    assert all(is_exact(case, roi) for roi in rois)
    ties = 0
    for roi in rois:
        top = sample_values(case, roi, image[int(roi[0])], Arithmetic.SIGNED).sort(-1, descending=True)[0]
        ties += int((top[..., 0] == top[..., 1]).sum())
    assert ties > 10


def test_a_bin_without_samples_is_zero() -> None:
    expectation = assert_oracle_is_explicit(dataclasses.replace(ONE, boxes="empty", sampling_ratio=0))
    assert expectation.output("closed")["output"].value.item() == 0
    assert expectation.gradients("closed")["grad:input"].majorant.max() == 0


def test_roundings_counted_by_hand() -> None:
    # A bilinear value; each of 24 bins may add four terms to one pixel.
    assert Expectation(RoIAlignMaxCase()).roundings == {"output": 7, "grad:input": 7 + 4 * 24}
