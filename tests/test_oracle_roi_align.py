"""The oracle of roi_align against explicit sums: two derivations, one answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from explicit import Array, RoIAlign

from cases.operator import Arithmetic
from cases.operators.roi_align import BOXES, OPERATOR, RoIAlignCase, SampledCase, bin_samples, is_exact
from conformance.expectation import Expectation

SMALL = RoIAlignCase(dtype="float64", size=(4, 5), channels=2, rois=5)


def explicit(case: SampledCase, *, absolute: bool = False, position_sensitive: bool = False) -> RoIAlign:
    """The explicit sums of a case."""
    return RoIAlign(
        output_size=case.output_size,
        spatial_scale=1 / case.scale,
        sampling_ratio=case.sampling_ratio,
        aligned=getattr(case, "aligned", True),
        position_sensitive=position_sensitive,
        absolute=absolute,
    )


def arrays(expectation: Expectation) -> list[Array]:
    """Input, rois and grad_output in float64."""
    tensors = [*(expectation.inputs[name] for name in ("input", "rois")), expectation.grad_output]
    return [tensor.double().numpy() for tensor in tensors]


def assert_oracle_is_explicit(case: SampledCase, *, position_sensitive: bool = False) -> Expectation:
    """Output and gradients are the explicit sums; the majorant is no smaller, and no larger where all is exact."""
    expectation = Expectation(case)
    signed = explicit(case, position_sensitive=position_sensitive)(*arrays(expectation))
    absolute = explicit(case, position_sensitive=position_sensitive, absolute=True)(*arrays(expectation))
    # An inexact sample moves by a bounded distance, and then feeds up to two pixels on either side of it.
    exact = all(is_exact(case, roi) for roi in expectation.inputs["rois"])
    for quantity, oracle in {**expectation.output("closed"), **expectation.gradients("closed")}.items():
        value, majorant = oracle.value.numpy(), oracle.majorant.numpy()
        np.testing.assert_allclose(value, signed[quantity], rtol=1e-11, atol=1e-12)
        assert np.all(majorant >= absolute[quantity] * (1 - 1e-12))
        if exact:
            np.testing.assert_allclose(majorant, absolute[quantity], rtol=1e-12)
    return expectation


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("boxes", BOXES)
def test_boxes(boxes: str, aligned: bool) -> None:
    assert_oracle_is_explicit(dataclasses.replace(SMALL, boxes=boxes, aligned=aligned))


@pytest.mark.parametrize("scale", [1, 4, 3])
@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
@pytest.mark.parametrize("boxes", ["interior", "beyond", "one_pixel", "empty", "inverted"])
def test_grids_and_scales(boxes: str, sampling_ratio: int, scale: int) -> None:
    changed = {"boxes": boxes, "sampling_ratio": sampling_ratio, "scale": scale, "output_size": (3, 2)}
    for aligned in (True, False):
        case = dataclasses.replace(SMALL, dtype="float32", size=(6, 3), aligned=aligned, **changed)  # type: ignore[arg-type]
        assert_oracle_is_explicit(case)


@pytest.mark.parametrize("boxes", ["integer", "last_pixel", "edge_low", "edge_high"])
def test_an_adaptive_grid_of_whole_bins_is_not_rounded_further_up(boxes: str) -> None:
    case = dataclasses.replace(SMALL, boxes=boxes, sampling_ratio=0, rois=8)
    expectation = assert_oracle_is_explicit(case)
    sizes = (expectation.inputs["rois"][:, 3:] - expectation.inputs["rois"][:, 1:3]) / torch.tensor(
        [3.0, 2.0]
    )
    assert bool((sizes == sizes.round()).any())


@pytest.mark.parametrize(
    ("centre", "expected"), [(-1.0, 1.0), (-1.125, 0.0), (-0.5, 1.0), (3.0, 4.0), (4.0, 4.0), (4.125, 0.0)]
)
def test_both_ends_are_closed_and_clamped(centre: float, expected: float) -> None:
    case = RoIAlignCase(
        dtype="float64",
        batch=1,
        channels=1,
        size=(4, 1),
        rois=1,
        output_size=(1, 1),
        sampling_ratio=1,
        aligned=False,
    )
    image = torch.tensor([1.0, 2.0, 3.0, 4.0]).double().reshape(1, 1, 4, 1)
    rois = torch.tensor([[0, -0.5, centre - 0.5, 0.5, centre + 0.5]]).double()
    pooled = OPERATOR.oracle(case, {"input": image, "rois": rois}, Arithmetic.SIGNED, "closed")
    assert pooled.item() == expected


@pytest.mark.parametrize("boxes", ["interior", "beyond", "rim", "above_grid_nano"])
def test_float64_boxes_use_the_precision_of_float64(boxes: str) -> None:
    rois = Expectation(dataclasses.replace(SMALL, boxes=boxes)).inputs["rois"]
    assert bool((rois[:, 1:] != rois[:, 1:].float()).any())


def test_a_box_just_beyond_a_whole_grid_gets_one_sample_more() -> None:
    case = dataclasses.replace(SMALL, rois=20, boxes="above_grid_nano", sampling_ratio=0)
    excess = []
    for roi in Expectation(case).inputs["rois"]:
        for axis, bins in enumerate(case.output_size):
            per_bin = float(roi[4 - axis] - roi[2 - axis]) / bins
            if abs(per_bin - round(per_bin)) < 1e-6:
                excess.append(per_bin - round(per_bin))
                assert bin_samples(case, roi, axis).count == round(per_bin) + 1
    assert len(excess) >= 20
    assert excess == pytest.approx([1e-9] * len(excess), rel=1e-3)


def test_the_majorant_of_an_inexact_box_is_that_of_its_roundings() -> None:
    # Nine roundings of numbers up to three extents each, spread by k >= 7, on the pixels nearer than two.
    case = dataclasses.replace(SMALL, batch=1, channels=1, rois=1, output_size=(1, 1), sampling_ratio=1)
    expectation = Expectation(case)
    roi = expectation.inputs["rois"][0]
    y, x = (float(bin_samples(case, roi, axis).positions[0, 0]) for axis in (0, 1))
    extent = float(roi[1:].abs().max()) + 1
    weights = []
    for position, length in ((y, 4), (x, 5)):
        pixels = np.arange(length)
        tent = np.maximum(0, 1 - np.abs(pixels - position))
        weights.append((tent, (np.abs(pixels - position) < 2) * 3 * extent * 9 / 7))
    image = expectation.inputs["input"].abs().numpy()[0, 0]
    majorant = expectation.output("closed")["output"].majorant
    (rows, row_errors), (columns, column_errors) = weights
    expected = rows @ image @ columns + row_errors @ image @ columns + rows @ image @ column_errors
    # Both weights are off at once only by another unit roundoff.
    both = row_errors @ image @ column_errors * 7 * 2.0**-53
    assert majorant.item() == pytest.approx(float(expected + both), rel=1e-12)


def test_roundings_counted_by_hand() -> None:
    # Four boxes of 2x3 bins with 2x2 samples, each a bilinear value of four terms; then the mean.
    expectation = Expectation(RoIAlignCase())
    assert expectation.roundings == {"output": 7 + 4 * 4 + 1, "grad:input": 7 + 1 + 4 * 4 * 6}


@pytest.mark.parametrize(("sampling_ratio", "exact"), [(2, True), (4, True), (3, False)])
def test_integer_data_is_judged_bit_for_bit_when_every_mean_is_exact(
    sampling_ratio: int, exact: bool
) -> None:
    case = RoIAlignCase(data="integer", sampling_ratio=sampling_ratio)
    expectation = Expectation(case)
    assert all(is_exact(case, roi) for roi in expectation.inputs["rois"])
    for each in (*expectation.output("closed").values(), *expectation.gradients("closed").values()):
        assert each.exact is exact
        terms = each.value / (OPERATOR.quantum(case) or 1)
        assert not exact or bool((terms == terms.round()).all())
    assert OPERATOR.quantum(dataclasses.replace(case, data="real")) == 0
