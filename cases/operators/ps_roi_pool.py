"""ps_roi_pool (R-FCN, Dai et al. 2016): the mean of each bin of a box with rounded corners, each from its own channel.

input (N, C*PH*PW, H, W); rois (K, 5) as in roi_pool; output (K, C, PH, PW). Bin (i, j) of output channel c is the
mean over input channel (c*PH + i)*PW + j. Corners and bins are those of `roi_pool`, but the last corner is the end of
the box. An empty bin is 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cases.dtypes import DTYPES
from cases.operator import Arithmetic, Tensors
from cases.operators.roi_pool import ROUNDED_BOXES, RoundedRoIOperator
from cases.rois import PositionSensitiveCase, is_dyadic


@dataclass(frozen=True)
class PSRoIPoolCase(PositionSensitiveCase):
    """Axes of ps_roi_pool; `channels` are those of the output."""

    OPERATOR: ClassVar[str] = "ps_roi_pool"


class PSRoIPool(RoundedRoIOperator[PSRoIPoolCase]):
    """Mean pooling, each bin from a channel of its own; rois are not differentiated."""

    name = "ps_roi_pool"
    case_type = PSRoIPoolCase
    with_last = False
    large_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float32", "float64"),
        "boxes": ("beyond", "interior"),
        "channels": (5,),
        "rois": (60,),
        "output_size": ((7, 7),),
    }
    axes: ClassVar[dict[str, Any]] = {
        "boxes": ROUNDED_BOXES,
        "dtype": tuple(DTYPES),
        "batch": (2, 34),
        "channels": (3, 1),
        "size": ((7, 9), (1, 6), (16, 12)),
        "rois": (4, 1),
        "output_size": ((2, 3), (7, 7), (13, 1)),
        "scale": (1, 4, 3),
        "layout": ("contiguous", "channels_last", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64", "float32", "float16"),
        "batch": (2, 34),
        "channels": (2,),
        "size": ((7, 9),),
        "rois": (4,),
        "output_size": ((2, 3), (7, 7)),
        "scale": (1, 4, 3),
        "layout": ("contiguous", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def areas(self, case: PSRoIPoolCase, roi: Tensor) -> Tensor:
        """The number of pixels of each bin of a box, (PH, PW)."""
        rows, columns = (torch.tensor([end - first for first, end in axis]) for axis in self.spans(case, roi))
        areas: Tensor = rows.clamp_min(0)[:, None] * columns.clamp_min(0)
        return areas

    def oracle(
        self, case: PSRoIPoolCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
    ) -> Tensor:
        image = arithmetic.of(tensors["input"]).reshape(
            case.batch, case.channels, *case.output_size, *case.size
        )
        # The empty sum keeps the output attached to the input, so that its gradient is zero, not absent.
        empty = image.sum() * 0
        pooled = []
        for roi in tensors["rois"]:
            rows, columns = (
                _membership(axis, length)
                for axis, length in zip(self.spans(case, roi), case.size, strict=True)
            )
            total = torch.einsum("ph,cpqhw,qw->cpq", rows, image[int(roi[0])], columns)
            pooled.append(total / self.areas(case, roi).clamp_min(1))
        shape = (case.rois, case.channels, *case.output_size)
        return (torch.stack(pooled) + empty) if pooled else empty.expand(shape)

    def roundings(self, case: PSRoIPoolCase, tensors: Tensors) -> dict[str, int]:
        largest = max((int(self.areas(case, roi).max()) for roi in tensors["rois"]), default=0)
        # A pixel is in at most one bin per box of those that read its channel.
        return {"output": largest + 1, "grad:input": case.rois + 1}

    def quantum(self, case: PSRoIPoolCase) -> float:
        return _share(self, case) / 4 if case.data == "integer" else 0.0


@functools.lru_cache(maxsize=16)
def _share(operator: PSRoIPool, case: PSRoIPoolCase) -> float:
    """What one pixel of the largest bin counts when all are powers of two, else 0."""
    areas = [operator.areas(case, roi).clamp_min(1) for roi in operator.sample(case)["rois"]]
    largest = max((int(area.max()) for area in areas), default=1)
    return 1 / largest if all(is_dyadic(int(pixels)) for area in areas for pixels in area.flatten()) else 0.0


def _membership(spans: list[tuple[int, int]], length: int) -> Tensor:
    """Whether each pixel of an axis is in each bin: (bins, length), 0 or 1."""
    pixel = torch.arange(length)
    return torch.stack([(first <= pixel) & (pixel < end) for first, end in spans]).double()


OPERATOR = PSRoIPool()
