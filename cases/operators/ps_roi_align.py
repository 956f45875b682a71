"""ps_roi_align: position-sensitive RoIAlign, R-FCN's channels (Dai et al. 2016) with roi_align's samples.

input (N, C*PH*PW, H, W); rois (K, 5) as in roi_align; output (K, C, PH, PW). Bin (i, j) of output channel c is the
mean of its samples of input channel (c*PH + i)*PW + j. Boxes are always aligned; a bin without samples is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cases.dtypes import DTYPES
from cases.operator import Arithmetic, Tensors
from cases.operators.roi_align import BOXES, SampledCase, SampledRoIOperator, mean_of_samples
from cases.rois import PositionSensitiveCase


@dataclass(frozen=True)
class PSRoIAlignCase(PositionSensitiveCase, SampledCase):
    """Axes of ps_roi_align; `channels` are those of the output."""

    OPERATOR: ClassVar[str] = "ps_roi_align"


class PSRoIAlign(SampledRoIOperator[PSRoIAlignCase]):
    """Mean pooling, each bin from a channel of its own; rois are not differentiated."""

    name = "ps_roi_align"
    case_type = PSRoIAlignCase
    large_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float32", "float64"),
        "boxes": ("beyond", "interior"),
        "channels": (5,),
        "rois": (60,),
        "output_size": ((7, 7),),
    }
    axes: ClassVar[dict[str, Any]] = {
        "boxes": BOXES,
        "dtype": tuple(DTYPES),
        "batch": (2, 34),
        "channels": (3, 1),
        "size": ((7, 9), (1, 6), (16, 12)),
        "rois": (4, 1),
        "output_size": ((2, 3), (3, 1)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0, 3),
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
        "output_size": ((2, 3), (3, 2)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0),
        "layout": ("contiguous", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def oracle(
        self, case: PSRoIAlignCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
    ) -> Tensor:
        image = tensors["input"].reshape(case.batch, case.channels, *case.output_size, *case.size)
        return mean_of_samples(case, {**tensors, "input": image}, arithmetic, "ph,cpqhw,qw->cpq")


OPERATOR = PSRoIAlign()
