"""roi_align (He et al. 2017; `aligned` from detectron2): mean of bilinear samples over a grid in each bin.

input (N, C, H, W); rois (K, 5) of batch index, x1, y1, x2, y2 in image units; output (K, C, PH, PW).
A box is coord*scale - o with o = 1/2 when aligned, else 0 and at least one pixel wide and high. Each bin has
sampling_ratio^2 samples, or ceil(size/bins) per axis when the ratio is 0. A sample with y < -1 or y > H is 0
(closed on both sides); otherwise y is clamped to 0 ... H - 1. A box with a NaN or an infinity has no samples
inside. rois have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.coordinates import SMOOTH, classify
from cases.data import draw, draw_image
from cases.dtypes import DTYPES, accumulation_dtype, unit_roundoff
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.layouts import LAYOUTS, lay_out
from cases.operator import Arithmetic, Constraint, Location, Operator, Tensors, at_least, one_of

Pair = tuple[int, int]

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

# No box that is not exact puts a sample this close to the discontinuities at -1 and L, or to a grid size, but
# for above_grid_nano, which is 1e-9 beyond a grid size.
CLEARANCE = 0.02
NANO_CLEARANCE = 1e-10


@dataclass(frozen=True)
class RoIAlignCase(Case):
    """Axes of roi_align; sizes are (height, width), `scale` is 1/spatial_scale."""

    OPERATOR: ClassVar[str] = "roi_align"

    batch: int = 2
    channels: int = 3
    size: Pair = (7, 9)
    rois: int = 4
    output_size: Pair = (2, 3)
    scale: int = 1
    sampling_ratio: int = 2
    aligned: bool = True
    boxes: str = "interior"
    layout: str = "contiguous"
    grad_layout: str = "contiguous"

    @property
    def boundary(self) -> str:
        return self.boxes

    @property
    def hostile(self) -> bool:
        # mmcv ignores the strides of rois, takes a coordinate for the batch index, and writes there.
        return self.layout in ("sliced", "transposed") or super().hostile

    @property
    def spatial_scale(self) -> float:
        """The factor from box units to pixels of the input."""
        return 1 / self.scale


@dataclass(frozen=True)
class BinSamples:
    """The samples of one box along one axis: positions (bins, grid), exact or computed with rounding."""

    positions: np.ndarray
    count: int
    exact: bool
    magnitude: float


def _why_empty(case: RoIAlignCase) -> str:
    smallest = min(case.batch, *case.size, *case.output_size)
    return "" if smallest > 0 else "an image and a bin have at least one pixel"


def _why_class(case: RoIAlignCase) -> str:
    possible = case.boxes not in ("interior", "integer") or min(case.size) > 1
    return "" if possible else f"an image of {case.size} has no such coordinates"


def _why_scale(case: RoIAlignCase) -> str:
    if case.scale < 1:
        return "scale is a positive integer"
    dyadic = case.scale & (case.scale - 1) == 0
    exact = case.boxes in EXACT or case.data == "integer"
    return "only a scale that is a power of two places samples exactly" if exact and not dyadic else ""


def _why_distance(case: RoIAlignCase) -> str:
    nano = case.boxes == "above_grid_nano" and case.dtype != "float64"
    return "only float64 tells 1e-9 from a whole grid" if nano else ""


def bin_samples(case: RoIAlignCase, roi: Tensor, axis: int) -> BinSamples:
    """Where the samples of one box fall along axis 0 (y) or 1 (x), in float64."""
    wide = _positions(case, roi, axis, np.float64)
    narrow = accumulation_dtype(DTYPES[case.dtype])
    rounded = _positions(case, roi, axis, np.float32 if narrow == torch.float32 else np.float64)
    # float64 itself is exact when the box is a multiple of 1/16 or coarser and the grid a power of two.
    corners = roi[1:].double() * 16
    dyadic = bool((corners == corners.round()).all()) and _is_dyadic(wide)
    exact = dyadic and wide.shape == rounded.shape and bool((wide == rounded).all())
    extent = float(roi[1:].double().nan_to_num(0, 0, 0).abs().max()) * case.spatial_scale + 1
    return BinSamples(wide, wide.shape[1], exact, 3 * extent)


def _is_dyadic(values: np.ndarray) -> bool:
    return bool((values * 2**20 == np.round(values * 2**20)).all())


def _positions(case: RoIAlignCase, roi: Tensor, axis: int, kind: type[np.floating[Any]]) -> np.ndarray:
    first, last = (roi[corner].double().numpy().astype(kind) for corner in (2 - axis, 4 - axis))
    scale, shift = kind(case.spatial_scale), kind(0.5 if case.aligned else 0)
    start, end = first * scale - shift, last * scale - shift
    extent = end - start if case.aligned else max(end - start, kind(1))
    bins = case.output_size[axis]
    if not np.isfinite([start, end]).all():
        return np.full((bins, max(case.sampling_ratio, 1)), np.nan)
    step = extent / kind(bins)
    grid = case.sampling_ratio if case.sampling_ratio > 0 else int(np.ceil(step))
    grid = max(grid, 0)
    inner = (np.arange(grid) + 0.5).astype(kind) * step / kind(max(grid, 1))
    result: np.ndarray = start + np.arange(bins).astype(kind)[:, None] * step + inner[None, :]
    return result


def bin_weights(case: RoIAlignCase, roi: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The weight of each pixel of an axis in each bin, summed over the grid: (bins, length).

    With them what the roundings of an inexact coordinate may change in each, in unit roundoffs over
    BILINEAR_ROUNDINGS, which is the least that a bound multiplies it by.
    """
    length = case.size[axis]
    samples = bin_samples(case, roi, axis)
    y = torch.as_tensor(samples.positions, dtype=torch.float64)
    inside = (y >= -1) & (y <= length)
    clamped = torch.where(inside, y.clamp(0, length - 1), 0)
    cell = clamped.floor()
    fraction = clamped - cell
    pixel = torch.arange(length, dtype=torch.float64)
    weights = (1 - fraction)[..., None] * (pixel == cell[..., None])
    weights = weights + fraction[..., None] * (pixel == cell[..., None] + 1)
    near = ((pixel - clamped[..., None]).abs() < 2).double() * (not samples.exact)
    errors = near * samples.magnitude * COORDINATE_ROUNDINGS / BILINEAR_ROUNDINGS
    return (weights * inside[..., None]).sum(1), (errors * inside[..., None]).sum(1)


def _pool(rows: Tensor, image: Tensor, columns: Tensor) -> Tensor:
    return torch.einsum("ph,chw,qw->cpq", rows, image, columns)


class RoIAlign(Operator[RoIAlignCase]):
    """Mean pooling; rois are not differentiated."""

    name = "roi_align"
    case_type = RoIAlignCase
    conventions = ("closed",)
    boundary_axis = "boxes"
    void: ClassVar[dict[str, Any]] = {"rois": 0}
    finite_difference_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64",),
        "boxes": SMOOTH,
        "batch": (1, 2),
        "channels": (2,),
        "size": ((4, 5),),
        "rois": (2,),
        "sampling_ratio": (0, 1, 2),
        "scale": (1, 2),
        "aligned": (True, False),
    }
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

    def constraints(self) -> tuple[Constraint[RoIAlignCase], ...]:
        return (
            one_of("boxes", BOXES),
            *(one_of(axis, LAYOUTS) for axis in ("layout", "grad_layout")),
            at_least("channels", 1),
            *(at_least(axis, 0) for axis in ("rois", "sampling_ratio")),
            Constraint(("batch", "size", "output_size"), _why_empty),
            Constraint(("boxes", "size"), _why_class),
            Constraint(("scale", "boxes"), _why_scale),
            Constraint(("scale", "data"), _why_scale),
            Constraint(("boxes", "dtype"), _why_distance),
        )

    def differentiable(self, case: RoIAlignCase) -> tuple[str, ...]:
        return ("input",)

    def sample(self, case: RoIAlignCase) -> Tensors:
        random = case.generator()
        image = draw_image(case, random, (case.batch, case.channels, *case.size))
        rois = torch.zeros(case.rois, 5, dtype=DTYPES[case.dtype])
        for number, roi in enumerate(rois):
            roi[0] = int(random.integers(case.batch))
            roi[1:] = torch.as_tensor(_draw_box(case, random, number), dtype=torch.float64)
        return {"input": lay_out(image, case.layout), "rois": lay_out(rois, case.layout)}

    def cotangent(self, case: RoIAlignCase, output: Tensor) -> Tensor:
        return lay_out(draw(case, case.generator("grad_output"), tuple(output.shape)), case.grad_layout)

    def arguments(self, case: RoIAlignCase) -> dict[str, Any]:
        return {
            "output_size": case.output_size,
            "spatial_scale": case.spatial_scale,
            "sampling_ratio": case.sampling_ratio,
            "aligned": case.aligned,
        }

    def oracle(self, case: RoIAlignCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        image = arithmetic.of(tensors["input"])
        pooled = []
        for roi in tensors["rois"]:
            (rows, row_errors), (columns, column_errors) = (bin_weights(case, roi, axis) for axis in (0, 1))
            count = bin_samples(case, roi, 0).count * bin_samples(case, roi, 1).count
            total = _pool(rows, image[int(roi[0])], columns)
            if arithmetic is Arithmetic.MAJORANT:
                # To first order one of the two weights is off, and both only by a unit roundoff more.
                both = row_errors * BILINEAR_ROUNDINGS * unit_roundoff(accumulation_dtype(DTYPES[case.dtype]))
                total = total + _pool(row_errors, image[int(roi[0])], columns)
                total = total + _pool(rows + both, image[int(roi[0])], column_errors)
            pooled.append(total / max(count, 1))
        # The empty sum keeps the output attached to the input, so that its gradient is zero, not absent.
        empty = image.sum() * 0
        shape = (case.rois, case.channels, *case.output_size)
        return (torch.stack(pooled) + empty) if pooled else empty.expand(shape)

    def roundings(self, case: RoIAlignCase, tensors: Tensors) -> dict[str, int]:
        counts = [
            bin_samples(case, roi, 0).count * bin_samples(case, roi, 1).count for roi in tensors["rois"]
        ]
        samples = 4 * max(counts, default=0)
        bins = case.output_size[0] * case.output_size[1]
        return {
            "output": BILINEAR_ROUNDINGS + samples + 1,
            "grad:input": BILINEAR_ROUNDINGS + 1 + sum(counts) * bins,
        }

    def locate(
        self, case: RoIAlignCase, tensors: Tensors, quantity: str, index: tuple[int, ...]
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


def _draw_box(case: RoIAlignCase, random: np.random.Generator, number: int) -> list[float]:
    """x1, y1, x2, y2 in box units of the case's box ``number``; one axis or both aim at the case's class.

    Of classes that come to nothing, the last of several boxes has neither, so that something is tested.
    """
    voiding = case.boxes in ("outside", "inverted", "non_finite") and case.rois > 1
    aims = 3 if voiding and number == case.rois - 1 else int(random.integers(3))
    kinds = [case.boxes if aims not in (axis, 3) else "beside" for axis in (0, 1)]
    (y1, y2), (x1, x2) = (_draw_span(case, random, axis, kind) for axis, kind in enumerate(kinds))
    return [x1, y1, x2, y2]


def _draw_span(case: RoIAlignCase, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
    shift = 0.5 if case.aligned else 0.0
    if kind == "non_finite":
        first, last = random.permutation([random.choice([np.nan, np.inf, -np.inf]), random.uniform(0, 5)])
        return float(first), float(last)
    for _ in range(200):
        start, extent = _draw_extent(case, random, axis, kind)
        both = torch.tensor([start + shift, start + shift + extent], dtype=torch.float64)
        corners = both / case.spatial_scale
        first, last = corners.to(DTYPES[case.dtype]).tolist()
        if _is_clear(case, axis, first, last, NANO_CLEARANCE if kind == "above_grid_nano" else CLEARANCE):
            return first, last
    raise RuntimeError(f"{case.id}: no box of kind {kind} keeps clear of the discontinuities")


def _draw_extent(
    case: RoIAlignCase, random: np.random.Generator, axis: int, kind: str
) -> tuple[float, float]:
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
    span = {
        "interior": (0.6, 0.9, 0.05, 0.3),
        "beside": (0.6, 0.9, 0.05, 0.3),
        "rim": (0.2, 0.4, -0.9 / length, -0.1 / length),
        "outside": (0.5, 0.9, 1.2, 3.0),
        "beyond": (1.4, 2.5, -0.7, -0.2),
        "one_pixel": (0.5 / length, 0.95 / length, 0.1, 0.8),
        "empty": (0.0, 0.0, 0.1, 0.8),
        "inverted": (-0.7, -0.3, 0.5, 0.9),
    }[kind]
    extent, start = random.uniform(*span[:2]) * length, random.uniform(*span[2:]) * length
    if case.data == "integer":
        step = (grid or 1) * 2.0 ** np.round(np.log2(max(abs(extent), 0.5) / bins / (grid or 1)))
        return float(np.round(start * 4) / 4), float(np.sign(extent) * step * bins)
    return float(start), float(extent)


def _is_clear(case: RoIAlignCase, axis: int, first: float, last: float, clearance: float) -> bool:
    """Whether rounding can't carry a sample over a discontinuity, or the adaptive grid to another size."""
    roi = torch.zeros(5, dtype=DTYPES[case.dtype])
    roi[2 - axis], roi[4 - axis] = first, last
    samples = bin_samples(case, roi, axis)
    if samples.exact:
        return True
    y, length = samples.positions, case.size[axis]
    if y.size and min(np.abs(y + 1).min(), np.abs(y - length).min()) < clearance:
        return False
    extent = (last - first) * case.spatial_scale
    widened_to_one_pixel = not case.aligned and extent < 1 - clearance
    if case.sampling_ratio > 0 or widened_to_one_pixel or extent == 0:
        return True
    per_bin = extent / case.output_size[axis]
    return abs(per_bin - round(per_bin)) > clearance


OPERATOR = RoIAlign()
