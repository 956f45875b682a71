"""roi_align (He et al. 2017; `aligned` from detectron2): mean of bilinear samples over a grid in each bin.

input (N, C, H, W); rois (K, 5) of batch index, x1, y1, x2, y2 in image units; output (K, C, PH, PW).
A box is coord*scale - o with o = 1/2 when aligned, else 0 and at least one pixel wide and high. Each bin has
sampling_ratio^2 samples, or ceil(size/bins) per axis when the ratio is 0. A sample with y < -1 or y > H is 0
(closed on both sides); otherwise y is clamped to 0 ... H - 1. A box with a NaN or an infinity has no samples
inside. rois have no gradient here; `roi_align_rois_grad` is the operator with one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from cases.coordinates import SMOOTH, classify
from cases.dtypes import DTYPES, accumulation_dtype, unit_roundoff
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.layouts import LAYOUTS
from cases.operator import Arithmetic, Constraint, Location, Tensors, at_least, with_slope_of
from cases.rois import CLEARANCE, RoICase, RoIOperator, is_dyadic, random_span, wide_kind

# Where the samples of a box fall: one sample exactly there, or the whole box of that kind.
BOXES = (
    "interior",
    "integer",
    "last_pixel",
    "rim",
    "edge_low",
    "edge_high",
    "outside",
    "beyond",
    "one_pixel",
    "empty",
    "inverted",
    "above_grid_nano",
    "non_finite",
)

# Boxes whose samples must hit their class exactly.
EXACT = ("integer", "last_pixel", "edge_low", "edge_high")

# Roundings of one sampling coordinate: scale, offset, size, bin, grid step, two products and two sums.
COORDINATE_ROUNDINGS = 9

# above_grid_nano is 1e-9 beyond a grid size.
NANO_CLEARANCE = 1e-10

# A position is taken for a sum of powers of two when it has no more binary digits after the point.
_FRACTION_BITS = 20


@dataclass(frozen=True)
class SampledCase(RoICase):
    """A case whose bins are sampled on a grid."""

    sampling_ratio: int = 2

    @property
    def is_aligned(self) -> bool:
        """Whether boxes are moved by half a pixel and may be of any size."""
        return True


@dataclass(frozen=True)
class RoIAlignCase(SampledCase):
    """Axes of roi_align."""

    OPERATOR: ClassVar[str] = "roi_align"

    aligned: bool = True

    @property
    def is_aligned(self) -> bool:
        return self.aligned

    @property
    def hostile(self) -> bool:
        # mmcv ignores the strides of rois, takes a coordinate for the batch index, and writes there.
        return self.layout in ("sliced", "transposed") or super().hostile


S = TypeVar("S", bound=SampledCase)
A = TypeVar("A", bound=RoIAlignCase)


@dataclass(frozen=True)
class BinSamples:
    """The samples of one box along one axis: positions (bins, grid), exact or computed with rounding.

    ``widened`` boxes have a fixed size of one pixel.
    """

    positions: np.ndarray
    count: int
    exact: bool
    magnitude: float
    widened: bool


def _why_class(case: SampledCase) -> str:
    possible = case.boxes not in ("interior", "integer") or min(case.size) > 1
    return "" if possible else f"an image of {case.size} has no such coordinates"


def bin_samples(case: SampledCase, roi: Tensor, axis: int) -> BinSamples:
    """Where the samples of one box fall along axis 0 (y) or 1 (x), in float64."""
    corners = roi.detach().double()[1:].numpy()
    return _bin_samples(
        case, float(np.abs(np.nan_to_num(corners, posinf=0, neginf=0)).max()), *corners[1 - axis :: 2], axis
    )


@functools.lru_cache(maxsize=4096)
def _bin_samples(case: SampledCase, farthest: float, first: float, last: float, axis: int) -> BinSamples:
    wide, _ = _positions(case, first, last, axis, np.float64)
    rounded, widened = _positions(case, first, last, axis, wide_kind(case))
    # float64 itself is exact when the box is a multiple of 1/16 or coarser and the grid a power of two.
    dyadic = _has_bits(np.array([first, last]), 4) and _has_bits(wide, _FRACTION_BITS)
    exact = dyadic and wide.shape == rounded.shape and bool((wide == rounded).all())
    return BinSamples(wide, wide.shape[1], exact, 3 * (farthest * case.spatial_scale + 1), widened)


def _has_bits(values: np.ndarray, bits: int) -> bool:
    return bool((values * 2**bits == np.round(values * 2**bits)).all())


def _positions(
    case: SampledCase, first: float, last: float, axis: int, kind: type[np.floating[Any]]
) -> tuple[np.ndarray, bool]:
    """The positions as ``kind`` computes them, and whether the box was too small for them."""
    scale, shift = kind(case.spatial_scale), kind(0.5 if case.is_aligned else 0)
    start, end = kind(first) * scale - shift, kind(last) * scale - shift
    bins = case.output_size[axis]
    if not np.isfinite([start, end]).all():
        return np.full((bins, max(case.sampling_ratio, 1)), np.nan), False
    widened = bool(not case.is_aligned and end - start < 1)
    extent = kind(1) if widened else end - start
    step = extent / kind(bins)
    grid = case.sampling_ratio if case.sampling_ratio > 0 else int(np.ceil(step))
    grid = max(grid, 0)
    inner = (np.arange(grid) + 0.5).astype(kind) * step / kind(max(grid, 1))
    result: np.ndarray = start + np.arange(bins).astype(kind)[:, None] * step + inner[None, :]
    return result, widened


def _moving_positions(case: SampledCase, roi: Tensor, axis: int, samples: BinSamples) -> Tensor:
    """The positions (bins, grid), which move with the box: at a fraction t of it, dy/dy1 = s*(1 - t), dy/dy2 = s*t.

    Both factors are positive, so that the two arithmetics agree. A widened box moves as a whole.
    """
    y = torch.as_tensor(samples.positions, dtype=torch.float64)
    if not roi.requires_grad or not bool(y.isfinite().all()):
        return y
    bins, grid = y.shape
    within = (torch.arange(grid, dtype=torch.float64) + 0.5) / max(grid, 1)
    t = (torch.arange(bins, dtype=torch.float64)[:, None] + within) / bins * (not samples.widened)
    return with_slope_of(y, (roi[2 - axis] * (1 - t) + roi[4 - axis] * t) * case.spatial_scale)


def sample_weights(
    case: SampledCase, roi: Tensor, axis: int, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """The weight of each pixel of an axis in each sample: (bins, grid, length).

    With them what the roundings of an inexact coordinate may change in each, in unit roundoffs over
    BILINEAR_ROUNDINGS, which is the least that a bound multiplies it by. At a kink the slope is that of the cell to
    the right; a position below the first pixel, on the last one or beyond has none.
    """
    length = case.size[axis]
    samples = bin_samples(case, roi, axis)
    y = _moving_positions(case, roi, axis, samples)
    fixed = y.detach()
    inside = (fixed >= -1) & (fixed <= length)
    clamped = torch.where(
        (fixed >= 0) & (fixed < length - 1), y, torch.where(inside, fixed.clamp(0, length - 1), 0)
    )
    cell = clamped.detach().floor()
    fraction = clamped - cell
    pixel = torch.arange(length, dtype=torch.float64)
    weights = arithmetic.one_minus(fraction)[..., None] * (pixel == cell[..., None])
    weights = weights + fraction[..., None] * (pixel == cell[..., None] + 1)
    near = ((pixel - clamped.detach()[..., None]).abs() < 2).double() * (not samples.exact)
    errors = near * samples.magnitude * COORDINATE_ROUNDINGS / BILINEAR_ROUNDINGS
    return weights * inside[..., None], errors * inside[..., None]


def contract(
    case: SampledCase,
    equation: str,
    image: Tensor,
    rows: tuple[Tensor, Tensor],
    columns: tuple[Tensor, Tensor],
    arithmetic: Arithmetic,
) -> Tensor:
    """einsum(rows, image, columns), in the majorant with the errors of the weights."""
    (row_weights, row_errors), (column_weights, column_errors) = rows, columns
    total = torch.einsum(equation, row_weights, image, column_weights)
    if arithmetic is Arithmetic.MAJORANT:
        # To first order one of the two weights is off, and both only by a unit roundoff more.
        both = row_errors * BILINEAR_ROUNDINGS * unit_roundoff(accumulation_dtype(DTYPES[case.dtype]))
        total = total + torch.einsum(equation, row_errors, image, column_weights)
        total = total + torch.einsum(equation, row_weights + both, image, column_errors)
    return total


def mean_of_samples(case: SampledCase, tensors: Tensors, arithmetic: Arithmetic, equation: str) -> Tensor:
    """The mean over the samples of each bin, (K, C, PH, PW); ``equation`` contracts rows, image and columns."""
    image = arithmetic.of(tensors["input"])
    pooled = []
    for roi in tensors["rois"]:
        rows, columns = (
            tuple(weights.sum(1) for weights in sample_weights(case, roi, axis, arithmetic))
            for axis in (0, 1)
        )
        total = contract(case, equation, image[int(roi[0])], rows, columns, arithmetic)  # type: ignore[arg-type]
        pooled.append(total / max(sample_count(case, roi), 1))
    # The empty sum keeps the output attached to its inputs, so that their gradient is zero, not absent.
    empty = image.sum() * 0 + tensors["rois"].nan_to_num(0, 0, 0).sum() * 0
    shape = (case.rois, case.channels, *case.output_size)
    return (torch.stack(pooled) + empty) if pooled else empty.expand(shape)


def sample_count(case: SampledCase, roi: Tensor) -> int:
    """How many samples each bin of a box has."""
    return bin_samples(case, roi, 0).count * bin_samples(case, roi, 1).count


def is_exact(case: SampledCase, roi: Tensor) -> bool:
    """Whether every sample of a box falls where it is computed, without any rounding."""
    return all(bin_samples(case, roi, axis).exact for axis in (0, 1))


@functools.lru_cache(maxsize=16)
def weight_quantum(operator: SampledRoIOperator[Any], case: SampledCase, *, is_mean: bool) -> float:
    """A power of two of which all weights of all samples are multiples; 0 when there is none."""
    bits = 0
    for roi in operator.sample(case)["rois"]:
        both = [bin_samples(case, roi, axis) for axis in (0, 1)]
        count = max(both[0].count * both[1].count, 1) if is_mean else 1
        if not all(samples.exact for samples in both) or not is_dyadic(count):
            return 0.0
        digits = [
            next(digit for digit in range(_FRACTION_BITS + 1) if _has_bits(samples.positions, digit))
            for samples in both
        ]
        bits = max(bits, sum(digits) + count.bit_length() - 1)
    return 2.0**-bits


class SampledRoIOperator(RoIOperator[S]):
    """What is the same for every operator that samples its bins."""

    exact_boxes = EXACT
    finite_difference_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64",),
        "boxes": SMOOTH,
        "batch": (1, 2),
        "channels": (2,),
        "size": ((4, 5),),
        "rois": (2,),
        "sampling_ratio": (0, 1, 2),
        "scale": (1, 2),
    }

    def constraints(self) -> tuple[Constraint[S], ...]:
        return (
            *super().constraints(),
            at_least("sampling_ratio", 0),
            Constraint(("boxes", "size"), _why_class),
        )

    def arguments(self, case: S) -> dict[str, Any]:
        return {**super().arguments(case), "sampling_ratio": case.sampling_ratio}

    def roundings(self, case: S, tensors: Tensors) -> dict[str, int]:
        counts = [sample_count(case, roi) for roi in tensors["rois"]]
        samples = 4 * max(counts, default=0)
        return {
            "output": BILINEAR_ROUNDINGS + samples + 1,
            "grad:input": BILINEAR_ROUNDINGS + 1 + sum(counts) * case.bins,
        }

    def quantum(self, case: S) -> float:
        # Two tensors in halves make one term with the weights.
        return weight_quantum(self, case, is_mean=True) / 4 if case.data == "integer" else 0.0

    def locate(
        self, case: S, tensors: Tensors, quantity: str, index: tuple[int, ...]
    ) -> tuple[Location, ...]:
        if quantity not in ("output", "gradgrad:grad_output"):
            return ()
        roi, _, bin_y, bin_x = index
        rows = bin_samples(case, tensors["rois"][roi], 0).positions[bin_y]
        columns = bin_samples(case, tensors["rois"][roi], 1).positions[bin_x]
        classes_y, classes_x = classify(rows, case.size[0]), classify(columns, case.size[1])
        return tuple(
            Location(float(y), float(x), f"{class_y}/{class_x}")
            for y, class_y in zip(rows, classes_y, strict=True)
            for x, class_x in zip(columns, classes_x, strict=True)
        )

    def draw_span(self, case: S, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
        start, extent = _draw_span(case, random, axis, kind)
        return start + (0.5 if case.is_aligned else 0.0), extent

    def is_clear(self, case: S, roi: Tensor, axis: int, kind: str) -> bool:
        clearance = NANO_CLEARANCE if kind == "above_grid_nano" else CLEARANCE
        samples = bin_samples(case, roi, axis)
        if samples.exact:
            return True
        y, length = samples.positions, case.size[axis]
        if y.size and min(np.abs(y + 1).min(), np.abs(y - length).min()) < clearance:
            return False
        extent = float(roi[4 - axis].double() - roi[2 - axis].double()) * case.spatial_scale
        widened_to_one_pixel = not case.is_aligned and extent < 1 - clearance
        if case.sampling_ratio > 0 or widened_to_one_pixel or extent == 0:
            return True
        per_bin = extent / case.output_size[axis]
        return abs(per_bin - round(per_bin)) > clearance


class RoIAlignOperator(SampledRoIOperator[A]):
    """What the operators with roi_align's signature share."""

    finite_difference_axes: ClassVar[dict[str, Any]] = {
        **SampledRoIOperator.finite_difference_axes,
        "aligned": (True, False),
    }

    def arguments(self, case: A) -> dict[str, Any]:
        return {**super().arguments(case), "aligned": case.aligned}


class RoIAlign(RoIAlignOperator[RoIAlignCase]):
    """Mean pooling; rois are not differentiated."""

    name = "roi_align"
    case_type = RoIAlignCase
    leads_family = True
    large_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float32", "float64"),
        "boxes": ("beyond", "interior"),
        "channels": (130,),
        "rois": (30,),
        "output_size": ((7, 7),),
    }
    axes: ClassVar[dict[str, Any]] = {
        "boxes": BOXES,
        "dtype": tuple(DTYPES),
        "batch": (2, 1, 3, 34),
        "channels": (3, 1, 5),
        "size": ((7, 9), (8, 5), (1, 6), (2, 2), (16, 12)),
        "rois": (4, 1, 7),
        "output_size": ((2, 3), (1, 1), (3, 2), (7, 7)),
        "scale": (1, 2, 4, 16, 3),
        "sampling_ratio": (2, 0, 1, 3, 4),
        "aligned": (True, False),
        "layout": LAYOUTS,
        "grad_layout": LAYOUTS,
        "data": ("real", "integer"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": tuple(DTYPES),
        "batch": (2, 34),
        "channels": (3,),
        "size": ((7, 9), (8, 5)),
        "rois": (4,),
        "output_size": ((2, 3), (3, 2)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0, 1, 3),
        "aligned": (True, False),
        "layout": ("contiguous", "sliced", "channels_last"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def oracle(self, case: RoIAlignCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        return mean_of_samples(case, tensors, arithmetic, "ph,chw,qw->cpq")


def _draw_span(case: SampledCase, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
    """Start and size of a box along one axis, in pixels of the input."""
    length, bins = case.size[axis], case.output_size[axis]
    grid = case.sampling_ratio
    if kind in EXACT:
        # All of it dyadic: a bin as wide as a power of two times its grid, so that every sample is exact.
        step = (grid or 1) * random.choice([0.5, 1.0]) if case.data == "integer" or grid else 1.0
        aimed = {"last_pixel": length - 1, "edge_low": -1, "edge_high": length}
        target = aimed.get(kind, int(random.integers(0, max(length - 1, 1))))
        position = int(random.integers(bins)) * step + (int(random.integers(grid or 1)) + 0.5) * step / (
            grid or 1
        )
        return target - position, bins * step
    if kind == "above_grid_nano":
        return float(random.uniform(0, 1)), bins * (int(random.integers(1, 3)) + 1e-9)
    start, extent = random_span(case, random, axis, kind)
    if case.data == "integer":
        step = (grid or 1) * 2.0 ** np.round(np.log2(max(abs(extent), 0.5) / bins / (grid or 1)))
        return float(np.round(start * 4) / 4), float(np.sign(extent) * step * bins)
    return start, extent


OPERATOR = RoIAlign()
