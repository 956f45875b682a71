"""Regions of interest: the axes, the boxes and the sampler that the operators on them share.

input (N, C, H, W); rois (K, 5) of batch index, x1, y1, x2, y2 in image units; coord*spatial_scale is in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.data import draw, draw_image
from cases.dtypes import DTYPES, accumulation_dtype
from cases.layouts import LAYOUTS, lay_out
from cases.operator import Constraint, Cut, Operator, Tensors, at_least, one_of

Pair = tuple[int, int]

# No box that is not exact puts what is rounded this close to where a result jumps.
CLEARANCE = 0.02

# Boxes that contribute nothing, or may not.
VOIDING_BOXES = ("outside", "empty", "inverted", "non_finite")

# Size and start of a box along one axis: the ends of both ranges, in parts of the image's length.
_SPANS = {
    "interior": (0.6, 0.9, 0.05, 0.3),
    "beside": (0.6, 0.9, 0.05, 0.3),
    "outside": (0.5, 0.9, 1.2, 3.0),
    "beyond": (1.4, 2.5, -0.7, -0.2),
    "empty": (0.0, 0.0, 0.1, 0.8),
    "inverted": (-0.7, -0.3, 0.5, 0.9),
}


@dataclass(frozen=True)
class RoICase(Case):
    """Axes of every operator on boxes; sizes are (height, width), `scale` is 1/spatial_scale."""

    batch: int = 2
    channels: int = 3
    size: Pair = (7, 9)
    rois: int = 4
    output_size: Pair = (2, 3)
    scale: int = 1
    boxes: str = "interior"
    layout: str = "contiguous"
    grad_layout: str = "contiguous"

    @property
    def boundary(self) -> str:
        return self.boxes

    @property
    def spatial_scale(self) -> float:
        """The factor from box units to pixels of the input."""
        return 1 / self.scale

    @property
    def in_channels(self) -> int:
        """Channels of the input; `channels` are those of the output."""
        return self.channels

    @property
    def bins(self) -> int:
        """Bins of a box, PH*PW."""
        return self.output_size[0] * self.output_size[1]


@dataclass(frozen=True)
class PositionSensitiveCase(RoICase):
    """A case whose bin (i, j) of output channel c reads input channel (c*PH + i)*PW + j."""

    @property
    def in_channels(self) -> int:
        return self.channels * self.bins


R = TypeVar("R", bound=RoICase)


def is_dyadic(number: int) -> bool:
    """Whether a positive integer is a power of two."""
    return number & (number - 1) == 0


def wide_kind(case: Case) -> type[np.floating[Any]]:
    """The numpy type that coordinates are computed in."""
    return np.float32 if accumulation_dtype(DTYPES[case.dtype]) == torch.float32 else np.float64


def random_span(case: RoICase, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
    """Start and size in pixels, along one axis, of a box of one of the kinds that every operator has."""
    length = case.size[axis]
    if kind == "rim":
        ranges = (0.2, 0.4, -0.9 / length, -0.1 / length)
    elif kind == "one_pixel":
        ranges = (0.5 / length, 0.95 / length, 0.1, 0.8)
    else:
        ranges = _SPANS[kind]
    extent, start = random.uniform(*ranges[:2]) * length, random.uniform(*ranges[2:]) * length
    return float(start), float(extent)


def _why_empty(case: RoICase) -> str:
    smallest = min(case.batch, *case.size, *case.output_size)
    return "" if smallest > 0 else "an image and a bin have at least one pixel"


def _why_distance(case: RoICase) -> str:
    nano = case.boxes.endswith("_nano") and case.dtype != "float64"
    return "only float64 tells 1e-9 from nothing" if nano else ""


class RoIOperator(Operator[R]):
    """What is the same for every operator on boxes."""

    boundary_axis = "boxes"
    conventions = ("closed",)
    void: ClassVar[dict[str, Any]] = {"rois": 0}
    # Boxes that must hit their class exactly.
    exact_boxes: ClassVar[tuple[str, ...]] = ()

    def draw_span(self, case: R, random: np.random.Generator, axis: int, kind: str) -> tuple[float, float]:
        """Where a box starts along an axis, in coord*spatial_scale, and its size."""
        raise NotImplementedError

    def is_clear(self, case: R, roi: Tensor, axis: int, kind: str) -> bool:
        """Whether rounding can't carry anything of the box over a discontinuity of this axis."""
        raise NotImplementedError

    def constraints(self) -> tuple[Constraint[R], ...]:
        return (
            one_of("boxes", self.axes["boxes"]),  # type: ignore[arg-type]
            *(one_of(axis, LAYOUTS) for axis in ("layout", "grad_layout")),
            at_least("channels", 1),
            at_least("rois", 0),
            Constraint(("batch", "size", "output_size"), _why_empty),
            Constraint(("scale", "boxes"), self._why_scale),
            Constraint(("scale", "data"), self._why_scale),
            Constraint(("boxes", "dtype"), _why_distance),
        )

    def _why_scale(self, case: R) -> str:
        if case.scale < 1:
            return "scale is a positive integer"
        exact = case.boxes in self.exact_boxes or case.data == "integer"
        if exact and not is_dyadic(case.scale):
            return "only a scale that is a power of two places samples exactly"
        return ""

    def differentiable(self, case: R) -> tuple[str, ...]:
        return ("input",)

    def sample(self, case: R) -> Tensors:
        random = case.generator()
        image = draw_image(case, random, (case.batch, case.in_channels, *case.size))
        rois = torch.zeros(case.rois, 5, dtype=DTYPES[case.dtype])
        for number, roi in enumerate(rois):
            roi[0] = int(random.integers(case.batch))
            roi[1:] = torch.as_tensor(self._draw_box(case, random, number), dtype=torch.float64)
        image = self.settle(case, random, image, rois)
        return {"input": lay_out(image, case.layout), "rois": lay_out(rois, case.layout)}

    def settle(self, case: R, random: np.random.Generator, image: Tensor, rois: Tensor) -> Tensor:
        """The image, changed where the boxes need it to be."""
        return image

    def cotangent(self, case: R, output: Tensor) -> Tensor:
        return lay_out(draw(case, case.generator("grad_output"), tuple(output.shape)), case.grad_layout)

    def arguments(self, case: R) -> dict[str, Any]:
        return {"output_size": case.output_size, "spatial_scale": case.spatial_scale}

    def cuts(self, case: R) -> dict[str, Cut]:
        return {"channels": Cut({"input": 1}, 1), "rois": Cut({"rois": 0}, 0)}

    def image_alone(self, case: R, tensors: Tensors, image: int) -> tuple[Tensors, list[int]]:
        rows = [number for number, roi in enumerate(tensors["rois"]) if int(roi[0]) == image]
        rois = tensors["rois"][rows].clone()
        rois[:, 0] = 0
        return {"input": tensors["input"][image : image + 1], "rois": rois}, rows

    def larger(self, case: R) -> R:
        return replace(super().larger(case), rois=case.rois + 1)

    def _draw_box(self, case: R, random: np.random.Generator, number: int) -> list[float]:
        """x1, y1, x2, y2 in box units of the case's box ``number``; one axis or both aim at the case's class.

        Of classes that come to nothing, the last of several boxes has neither, so that something is tested.
        """
        voiding = case.boxes in VOIDING_BOXES and case.rois > 1
        aims = 3 if voiding and number == case.rois - 1 else int(random.integers(3))
        kinds = [case.boxes if aims not in (axis, 3) else "beside" for axis in (0, 1)]
        (y1, y2), (x1, x2) = (self._draw_corners(case, random, axis, kind) for axis, kind in enumerate(kinds))
        return [x1, y1, x2, y2]

    def _draw_corners(
        self, case: R, random: np.random.Generator, axis: int, kind: str
    ) -> tuple[float, float]:
        if kind == "non_finite":
            corners = random.permutation([random.choice([np.nan, np.inf, -np.inf]), random.uniform(0, 5)])
            return float(corners[0]), float(corners[1])
        for _ in range(200):
            start, extent = self.draw_span(case, random, axis, kind)
            both = torch.tensor([start, start + extent], dtype=torch.float64) / case.spatial_scale
            roi = torch.zeros(5, dtype=DTYPES[case.dtype])
            roi[2 - axis], roi[4 - axis] = both
            if self.is_clear(case, roi, axis, kind):
                return float(roi[2 - axis]), float(roi[4 - axis])
        raise RuntimeError(f"{case.id}: no box of kind {kind} keeps clear of the discontinuities")
