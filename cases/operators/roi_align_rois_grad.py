"""roi_align with gradients for the boxes too: the samples move with the box.

Shapes, samples and output are those of `roi_align`. At a fraction t of the box a sample has dy/dy1 = s*(1 - t) and
dy/dy2 = s*t, or s and 0 when the box is not aligned and was widened to one pixel. Over a cell the bilinear value has
its slope, at a kink that of the cell to the right; a clamped sample and one outside have none. The adaptive grid is
constant. The batch index has gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.dtypes import DTYPES
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.operator import Arithmetic, Tensors
from cases.operators.roi_align import (
    BOXES,
    RoIAlignCase,
    RoIAlignOperator,
    bin_samples,
    mean_of_samples,
    sample_count,
)

# No box that is not exact puts a sample this close to a pixel, where the slope jumps, or has this nearly the size of
# one pixel: more than finite differences and the roundings of a coordinate in float32 can move it.
KINK_CLEARANCE = 0.002

# Scale, fraction of the box, its complement, mean and cotangent on the way from a slope to a corner of the box.
SLOPE_ROUNDINGS = 8


@dataclass(frozen=True)
class RoIAlignRoisGradCase(RoIAlignCase):
    """Axes of roi_align_rois_grad."""

    OPERATOR: ClassVar[str] = "roi_align_rois_grad"

    @property
    def hostile(self) -> bool:
        return Case.hostile.fget(self)  # type: ignore[attr-defined, no-any-return]


class RoIAlignRoisGrad(RoIAlignOperator[RoIAlignRoisGradCase]):
    """Mean pooling, differentiable by input and rois."""

    name = "roi_align_rois_grad"
    case_type = RoIAlignRoisGradCase
    large_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float32", "float64"),
        "boxes": ("beyond", "interior"),
        "channels": (70,),
        "rois": (20,),
        "output_size": ((3, 3),),
    }
    axes: ClassVar[dict[str, Any]] = {
        "boxes": BOXES,
        "dtype": tuple(DTYPES),
        "batch": (2, 34),
        "channels": (3, 1),
        "size": ((7, 9), (2, 2), (16, 12)),
        "rois": (4, 1),
        "output_size": ((2, 3), (3, 1)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0, 3),
        "aligned": (True, False),
        "layout": ("contiguous", "channels_last", "transposed"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64", "float32", "float16"),
        "batch": (2,),
        "channels": (3,),
        "size": ((7, 9), (8, 5)),
        "rois": (4,),
        "output_size": ((2, 3), (3, 2)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0),
        "aligned": (True, False),
        "layout": ("contiguous", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def differentiable(self, case: RoIAlignRoisGradCase) -> tuple[str, ...]:
        return ("input", "rois")

    def oracle(
        self, case: RoIAlignRoisGradCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
    ) -> Tensor:
        return mean_of_samples(case, tensors, arithmetic, "ph,chw,qw->cpq")

    def roundings(self, case: RoIAlignRoisGradCase, tensors: Tensors) -> dict[str, int]:
        most = max((sample_count(case, roi) for roi in tensors["rois"]), default=0)
        terms = 4 * most * case.bins * case.channels
        return {
            **super().roundings(case, tensors),
            "grad:rois": BILINEAR_ROUNDINGS + SLOPE_ROUNDINGS + terms,
        }

    def quantum(self, case: RoIAlignRoisGradCase) -> float:
        return 0.0  # the fractions of a box are thirds too

    def smooth(self, case: RoIAlignRoisGradCase) -> bool:
        return super().smooth(case) and case.data == "real"

    def pin(self, tensors: Tensors) -> Tensors:
        rois = tensors["rois"]
        return {**tensors, "rois": torch.cat([rois[:, :1].detach().round(), rois[:, 1:]], 1)}

    def is_clear(self, case: RoIAlignRoisGradCase, roi: Tensor, axis: int, kind: str) -> bool:
        if not super().is_clear(case, roi, axis, kind):
            return False
        samples = bin_samples(case, roi, axis)
        if samples.exact:
            return True
        y, length = samples.positions, case.size[axis]
        kinks = np.round(y[(y > -0.5) & (y < length - 0.5)])
        distances = np.abs(y[(y > -0.5) & (y < length - 0.5)] - kinks)
        extent = float(roi[4 - axis].double() - roi[2 - axis].double()) * case.spatial_scale
        widening = np.inf if case.aligned else abs(extent - 1)
        return bool(min(distances.min(initial=np.inf), widening) > KINK_CLEARANCE)


OPERATOR = RoIAlignRoisGrad()
