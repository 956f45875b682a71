"""roi_pool (Fast R-CNN, Girshick 2015): the largest pixel of each bin of a box with rounded corners.

input (N, C, H, W); rois (K, 5) of batch index, x1, y1, x2, y2 in image units; output (K, C, PH, PW). Corners are
coord*spatial_scale, rounded half away from zero, and both belong to the box, which has at least one pixel. Of its
length the bin p covers floor(p*length/P) to ceil((p + 1)*length/P), whole numbers divided exactly, clipped to the
image. The first of the largest pixels in row-major order wins and gets the whole gradient, a NaN before all numbers;
an empty bin is 0 and has none. A box with a NaN or an infinity is empty. Corners count up to 2**30 pixels away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from cases.coordinates import SMOOTH
from cases.dtypes import DTYPES
from cases.operator import Arithmetic, Constraint, Location, Tensors, with_slope_of
from cases.rois import CLEARANCE, RoICase, RoIOperator, is_dyadic, random_span, wide_kind

# Boxes as the operators that round them tell them apart.
ROUNDED_BOXES = (
    "interior",
    "half",
    "below_half_nano",
    "last_pixel",
    "rim",
    "outside",
    "beyond",
    "one_pixel",
    "empty",
    "inverted",
    "uneven",
    "huge",
    "non_finite",
)

# The same, and boxes like interior over an image with NaN pixels.
BOXES = (*ROUNDED_BOXES, "nan_pixels")

# Boxes whose corners must fall exactly where they are meant to.
EXACT = ("half", "below_half_nano", "last_pixel", "uneven", "huge")

FARTHEST = 2**30

# Far beyond that, as a coordinate in pixels.
_HUGE = 2.0**33

# How long the boxes are among which `uneven` looks for one whose bins rounding makes larger or smaller.
_LONGEST = 70


@dataclass(frozen=True)
class RoIPoolCase(RoICase):
    """Axes of roi_pool."""

    OPERATOR: ClassVar[str] = "roi_pool"


Q = TypeVar("Q", bound=RoICase)


def _why_too_large(case: RoICase) -> str:
    too_large = case.boxes == "huge" and case.dtype == "float16"
    return "float16 has no such coordinates" if too_large else ""


def rounded_corners(case: RoICase, roi: Tensor, axis: int) -> tuple[int, int] | None:
    """First and last pixel of a box along axis 0 (y) or 1 (x); None when it is not finite."""
    if not bool(roi[1:].isfinite().all()):
        return None
    first, last = (_round(float(corner)) for corner in _scaled(case, roi, axis))
    return first, last


def _scaled(case: RoICase, roi: Tensor, axis: int) -> np.ndarray:
    """Both corners in pixels, computed in the dtype that coordinates are computed in."""
    kind = wide_kind(case)
    corners = roi.detach().double().numpy()[[2 - axis, 4 - axis]].astype(kind)
    scaled: np.ndarray = corners * kind(case.spatial_scale)
    return scaled


def _round(value: float) -> int:
    """Half away from zero, no further than FARTHEST."""
    whole = math.trunc(value)
    if abs(value - whole) >= 0.5:
        whole += 1 if value > 0 else -1
    return max(-FARTHEST, min(FARTHEST, whole))


def bin_edges(length: int, bins: int) -> list[tuple[int, int]]:
    """Where each bin of a box starts and ends, in pixels from the box's first."""
    return [(p * length // bins, -(-(p + 1) * length // bins)) for p in range(bins)]


def bin_spans(case: RoICase, roi: Tensor, axis: int, *, with_last: bool) -> list[tuple[int, int]]:
    """First pixel and end of each bin along an axis, within the image; ``with_last`` counts the last corner in."""
    corners = rounded_corners(case, roi, axis)
    if corners is None:
        return [(0, 0)] * case.output_size[axis]
    first, last = corners
    length = max(last - first + int(with_last), 1)
    return [
        tuple(max(0, min(case.size[axis], first + edge)) for edge in edges)  # type: ignore[misc]
        for edges in bin_edges(length, case.output_size[axis])
    ]


def rounds_unevenly(length: int, bins: int, kind: type[np.floating[Any]]) -> bool:
    """Whether bins whose edges are computed from a rounded length/bins differ from the exact ones."""
    step = kind(length) / kind(bins)
    rounded = [(math.floor(kind(p) * step), math.ceil(kind(p + 1) * step)) for p in range(bins)]
    return rounded != bin_edges(length, bins)


def uneven_length(case: RoICase, random: np.random.Generator, bins: int) -> int:
    """A length that the bins don't divide, if there is one whose rounded edges are wrong."""
    lengths = [length for length in range(2, _LONGEST) if length % bins or bins == 1]
    wrong = [length for length in range(2, _LONGEST) if rounds_unevenly(length, bins, wide_kind(case))]
    return int(random.choice(wrong or lengths))


class RoundedRoIOperator(RoIOperator[Q]):
    """What the operators share that round the corners of boxes."""

    exact_boxes = EXACT
    finite_difference_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64",),
        "boxes": SMOOTH,
        "batch": (1, 2),
        "channels": (2,),
        "size": ((4, 5),),
        "rois": (2, 3),
        "scale": (1, 2),
    }
    # Whether the pixel of the last corner belongs to the box.
    with_last: ClassVar[bool]

    def constraints(self) -> tuple[Constraint[Q], ...]:
        return (*super().constraints(), Constraint(("boxes", "dtype"), _why_too_large))

    def spans(self, case: Q, roi: Tensor) -> list[list[tuple[int, int]]]:
        """The pixels of each bin, rows and columns."""
        return [bin_spans(case, roi, axis, with_last=self.with_last) for axis in (0, 1)]

    def locate(
        self, case: Q, tensors: Tensors, quantity: str, index: tuple[int, ...]
    ) -> tuple[Location, ...]:
        if quantity not in ("output", "gradgrad:grad_output"):
            return ()
        roi, _, bin_y, bin_x = index
        rows, columns = self.spans(case, tensors["rois"][roi])
        return tuple(
            Location(float(y), float(x), "pixel") for y in range(*rows[bin_y]) for x in range(*columns[bin_x])
        )

    def draw_span(self, case: Q, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
        length, bins = case.size[axis], case.output_size[axis]
        if kind in ("half", "below_half_nano"):
            half = int(random.integers(-3, max(length - 1, 1))) + 0.5
            return half - 1e-9 * (kind == "below_half_nano"), int(random.integers(0, length + 1))
        if kind == "last_pixel":
            size = int(random.integers(0, length))
            return int(random.integers(length - 1, length + 1)) - size, size
        if kind == "uneven":
            # The last bin, where roundings add up, ends on the image but before its last pixel.
            size = uneven_length(case, random, bins)
            return int(random.integers(1, max(length, 2))) - size, size - int(self.with_last)
        if kind == "huge":
            near = int(random.integers(length))
            first, last = [(-_HUGE, _HUGE), (-_HUGE, near), (near, _HUGE)][int(random.integers(3))]
            return first, last - first
        start, extent = random_span(case, random, axis, "interior" if kind == "nan_pixels" else kind)
        if case.data == "integer":
            # Bins as wide as a power of two, so that a mean over them is exact.
            step = 2.0 ** max(math.floor(math.log2(max(abs(extent), 1) / bins)), 0)
            return float(np.round(start)), float(np.sign(extent) * step * bins)
        return start, extent

    def is_clear(self, case: Q, roi: Tensor, axis: int, kind: str) -> bool:
        if is_dyadic(case.scale):
            return True  # nothing is rounded before the corners are
        distance = np.abs(np.abs(np.modf(_scaled(case, roi, axis))[0]) - 0.5)
        return bool((distance > CLEARANCE).all())


class RoIPool(RoundedRoIOperator[RoIPoolCase]):
    """Max pooling; rois are not differentiated."""

    name = "roi_pool"
    case_type = RoIPoolCase
    with_last = True
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
        "batch": (2, 34),
        "channels": (3, 1),
        "size": ((7, 9), (1, 6), (16, 12)),
        "rois": (4, 1),
        "output_size": ((2, 3), (7, 7), (13, 1)),
        "scale": (1, 4, 3),
        "layout": ("contiguous", "channels_last", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer", "negative"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64", "float32", "float16"),
        "batch": (2, 34),
        "channels": (3,),
        "size": ((7, 9),),
        "rois": (4,),
        "output_size": ((2, 3), (7, 7)),
        "scale": (1, 4, 3),
        "layout": ("contiguous", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def smooth(self, case: RoIPoolCase) -> bool:
        return super().smooth(case) and case.data == "real"

    def settle(self, case: RoIPoolCase, random: np.random.Generator, image: Tensor, rois: Tensor) -> Tensor:
        if case.boxes == "nan_pixels":
            image[torch.as_tensor(random.random(tuple(image.shape)) < 0.1)] = torch.nan
        return image

    def winners(self, case: RoIPoolCase, image: Tensor, rois: Tensor) -> Tensor:
        """The flat index of the winning pixel of each bin, -1 where there is none: (K, C, PH, PW)."""
        pixels = image.detach().numpy()
        found = np.full((case.rois, case.channels, *case.output_size), -1)
        for number, roi in enumerate(rois):
            rows, columns = self.spans(case, roi)
            for (i, (top, bottom)), (j, (left, right)) in (
                (row, column) for row in enumerate(rows) for column in enumerate(columns)
            ):
                if top < bottom and left < right:
                    plane = pixels[int(roi[0]), :, top:bottom, left:right].reshape(case.channels, -1)
                    y, x = np.divmod(plane.argmax(1), right - left)  # the first NaN, else the first largest
                    found[number, :, i, j] = (top + y) * case.size[1] + left + x
        return torch.as_tensor(found)

    def oracle(self, case: RoIPoolCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        index = self.winners(case, tensors["input"], tensors["rois"])
        image = tensors["input"]
        if arithmetic is Arithmetic.MAJORANT:
            image = with_slope_of(image.abs().nan_to_num(1), image)
        planes = image.flatten(2)[tensors["rois"][:, 0].long()]
        chosen = planes.gather(2, index.clamp_min(0).flatten(2)).reshape(index.shape)
        return torch.where(index >= 0, chosen, 0)

    def roundings(self, case: RoIPoolCase, tensors: Tensors) -> dict[str, int]:
        # A pixel may win every bin of every box. One rounding is less than any other pixel's distance.
        return {"output": 1, "grad:input": max(case.rois * case.bins, 1)}

    def quantum(self, case: RoIPoolCase) -> float:
        return 0.5 if case.data == "integer" else 0.0


OPERATOR = RoIPool()
