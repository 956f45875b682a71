"""Coordinates land in the class that they were drawn for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from cases.coordinates import (
    BOUNDARIES,
    CLASSES,
    NEIGHBOURS,
    SMOOTH,
    VOIDING,
    add_rounded,
    classify,
    possible,
    sample_coordinates,
)
from cases.dtypes import DTYPES
from cases.layouts import FILLER, LAYOUTS, lay_out
from cases.operators.deform_conv2d import OPERATOR, DeformConv2dCase, positions
from cases.operators.roi_align import OPERATOR as ROI_ALIGN
from cases.operators.roi_align import RoIAlignCase, bin_samples

LENGTHS = (1, 2, 3, 7, 16)
# Bases as taps and strides make them: left of the image, in it, and right of it.
BASES = np.tile(np.arange(-6.0, 24.0), 40)


def fall(boundary: str, length: int, dtype: torch.dtype, *, quarters: bool = False) -> np.ndarray:
    """Where the samples of a class fall once dtype has rounded them."""
    random = np.random.default_rng(length)
    offsets = sample_coordinates(boundary, length, BASES, dtype, random, quarters=quarters)
    held = torch.as_tensor(offsets).to(dtype)
    assert np.array_equal(held.double().numpy(), offsets, equal_nan=True), (
        "the dtype does not hold the offsets"
    )
    return add_rounded(BASES, held).numpy()


def expected_class(y: float, length: int) -> str:
    """The table of classes, one row at a time."""
    if math.isnan(y) or math.isinf(y):
        return "non_finite"
    if y == -1:
        return "edge_low"
    if y == length:
        return "edge_high"
    if y < -1 or y > length:
        return "outside"
    if -1 < y < 0 or length - 1 < y < length:
        return "rim"
    if y == length - 1:
        return "last_pixel"
    return "integer" if y == round(y) else "interior"


@pytest.mark.parametrize("length", LENGTHS)
def test_classify(length: int) -> None:
    kinks = [-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, length - 1.0, float(length), length + 1.0]
    beside = [math.nextafter(kink, side) for kink in kinks for side in (-math.inf, math.inf)]
    points = [*kinks, *beside, -0.5, 0.5, length - 0.5, 1e30, -1e30, math.nan, math.inf, -math.inf]
    found = classify(np.array(points), length).tolist()
    assert found == [expected_class(y, length) for y in points]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quarters", [False, True])
@pytest.mark.parametrize("boundary", CLASSES)
def test_samples_land_in_their_class(boundary: str, quarters: bool, dtype: str, length: int) -> None:
    if not possible(boundary, length):
        assert length == 1
        return
    y = fall(boundary, length, DTYPES[dtype], quarters=quarters)
    assert set(classify(y, length)) == {boundary}
    if boundary == "rim":
        assert (y < 0).any()
        assert (y > length - 1).any()
    if boundary == "outside":
        assert (y < -1000).any()
        assert (y > 1000).any()
        assert ((y > -3) & (y < -1)).any()
    if quarters and boundary in ("interior", "rim"):
        assert np.array_equal(y * 4, np.round(y * 4))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("boundary", NEIGHBOURS)
def test_neighbours_are_beside_the_kink_never_on_it(boundary: str, dtype: str, length: int) -> None:
    side, _, distance = boundary.rpartition("_")
    if distance == "nano" and dtype != "float64":
        return
    y = fall(boundary, length, DTYPES[dtype])
    kinks = [-1, length] if side.endswith("edge") else range(length)
    kink = np.array(kinks)[np.abs(y[:, None] - np.array(kinks)).argmin(1)]
    apart = y - kink
    assert (apart != 0).all()
    if side == "below_integer":
        assert (apart < 0).all()
        assert set(classify(y, length)) <= {"rim", "interior"}
    elif side == "above_integer":
        assert (apart > 0).all()
        assert set(classify(y, length)) <= {"rim", "interior"}
    else:
        assert set(classify(y, length)) == {"rim" if side == "inside_edge" else "outside"}
    if distance == "nano":
        assert np.abs(np.abs(apart) - 1e-9).max() < 1e-14
    else:
        # The coordinate's own spacing is finer than the offset's when they differ in size.
        scale = np.maximum(np.maximum(np.abs(kink), np.abs(kink - BASES)), 1)
        unit = torch.finfo(DTYPES[dtype]).eps * 2.0 ** np.floor(np.log2(scale))
        assert (np.abs(apart) <= 2 * unit).all()
    if side.endswith("edge") or length > 1:
        assert len(set(kink)) == len(set(kinks))


def test_zero_and_mixed() -> None:
    assert not fall("zero", 5, torch.float32)[BASES == 0].any()
    assert np.array_equal(fall("zero", 5, torch.float32), BASES)
    assert set(classify(fall("mixed", 5, torch.float32), 5)) == set(CLASSES[:-1])


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"boundary: got 'beside_ulp', expected one of interior"):
        sample_coordinates("beside_ulp", 5, BASES, torch.float32, np.random.default_rng(0))


def test_the_sum_of_base_and_offset_is_rounded_once_to_the_dtype() -> None:
    base, offset = np.array([7.0, -2048.0, 0.0]), torch.tensor([0.0010004, 0.7, 0.1]).half()
    expected = (base + offset.double().numpy()).astype(np.float16)
    assert add_rounded(base, offset).tolist() == expected.tolist()
    fine = torch.tensor([1e-9, 0.3, 0.1], dtype=torch.float64)
    assert add_rounded(base, fine).tolist() == (base + fine.numpy()).tolist()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_cases_of_a_class_really_have_such_samples(boundary: str) -> None:
    case = DeformConv2dCase(dtype="float64", offsets=boundary, offset_groups=2)
    y, x = (axis.numpy() for axis in positions(case, OPERATOR.sample(case)["offset"].double()))
    classes = np.stack([classify(y, case.size[0]), classify(x, case.size[1])])
    wanted = {
        **{name: {name} for name in CLASSES},
        **{
            name: {"rim", "interior"} for name in NEIGHBOURS if name.endswith(("integer_ulp", "integer_nano"))
        },
        **{name: {"rim"} for name in NEIGHBOURS if name.startswith("inside_edge")},
        **{name: {"outside"} for name in NEIGHBOURS if name.startswith("outside_edge")},
        "zero": {"edge_low", "integer"},
        "mixed": {"edge_low", "interior", "outside"},
    }[boundary]
    assert wanted <= set(classes.flatten())
    hit = np.isin(classes, list(wanted))
    if boundary not in ("zero", "mixed", "interior"):
        # Both axes have the class on their own, and in some sample together.
        assert (hit[0] & hit[1]).any()
        assert boundary.endswith(("integer_ulp", "integer_nano")) or (hit[0] & ~hit[1]).any()
    if boundary in VOIDING:
        assert (~hit[0] & ~hit[1]).any()
    if boundary in SMOOTH:
        assert set(classes.flatten()) <= {boundary, "interior"}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    "boxes", ["interior", "integer", "last_pixel", "rim", "edge_low", "edge_high", "outside"]
)
def test_boxes_of_a_class_have_a_sample_exactly_there(boxes: str, aligned: bool) -> None:
    for dtype in DTYPES:
        case = RoIAlignCase(dtype=dtype, boxes=boxes, aligned=aligned, rois=8)
        found: set[str] = set()
        for roi in ROI_ALIGN.sample(case)["rois"]:
            for axis in (0, 1):
                samples = bin_samples(case, roi, axis)
                found.update(classify(samples.positions, case.size[axis]).flatten())
        assert boxes in found


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_have_their_strides_and_equal_values(dtype: str) -> None:
    values = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(DTYPES[dtype])
    strides = {
        "contiguous": (60, 20, 5, 1),
        "channels_last": (60, 1, 15, 3),
        "sliced": (120, 40, 10, 2),
        "transposed": (60, 20, 1, 4),
    }
    assert set(strides) == set(LAYOUTS)
    for layout, expected in strides.items():
        laid_out = lay_out(values, layout)
        assert laid_out.stride() == expected
        assert laid_out.dtype == values.dtype
        assert torch.equal(laid_out, values)
    beside = lay_out(values, "sliced").as_strided((2, 3, 4, 5), strides["sliced"], 1)
    assert bool((beside == FILLER).all())
    with pytest.raises(ValueError, match="layout: got 'diagonal', expected one of contiguous"):
        lay_out(values, "diagonal")


def test_layouts_of_fewer_dimensions() -> None:
    vector, matrix = torch.arange(3.0), torch.arange(6.0).reshape(2, 3)
    for layout in LAYOUTS:
        assert torch.equal(lay_out(vector, layout), vector)
        assert torch.equal(lay_out(matrix, layout), matrix)
    assert lay_out(matrix, "transposed").stride() == (1, 2)
    assert lay_out(matrix, "sliced").stride() == (6, 2)


def test_a_case_lays_out_all_of_its_tensors() -> None:
    case = DeformConv2dCase(layout="sliced", grad_layout="transposed")
    tensors = OPERATOR.sample(case)
    assert not any(tensors[name].is_contiguous() for name in ("input", "offset", "mask", "weight"))
    assert OPERATOR.cotangent(case, torch.zeros(2, 4, 5, 6)).stride()[-2:] == (1, 5)
    plain = dataclasses.replace(case, layout="contiguous")
    assert all(tensor.is_contiguous() for tensor in OPERATOR.sample(plain).values())
