"""roi_align in mmcv's mode 'max': the largest bilinear sample of each bin.

Shapes and samples are those of `roi_align`; a sample outside the image counts with the value 0. Of equal samples the
first in row-major order wins, and gets the whole gradient. A bin without samples is 0 and has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cases.data import draw_image
from cases.dtypes import DTYPES, accumulation_dtype, unit_roundoff
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.operator import Arithmetic, Tensors
from cases.operators.roi_align import (
    BOXES,
    RoIAlignCase,
    RoIAlignOperator,
    bin_samples,
    contract,
    is_exact,
    sample_count,
    sample_weights,
    weight_quantum,
)

# What finite differences may move a sample by, and what the winner of a bin is clear by in any case.
FINITE_STEP = 1e-5


@dataclass(frozen=True)
class RoIAlignMaxCase(RoIAlignCase):
    """Axes of roi_align_max."""

    OPERATOR: ClassVar[str] = "roi_align_max"


def sample_values(case: RoIAlignMaxCase, roi: Tensor, planes: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The bilinear samples of the bins of one box, (C, PH, PW, samples), of an image's planes (C, H, W)."""
    rows, columns = (sample_weights(case, roi, axis, arithmetic) for axis in (0, 1))
    return contract(case, "pgh,chw,qkw->cpqgk", planes, rows, columns, arithmetic).flatten(3)


def winners(values: Tensor) -> Tensor:
    """The index of the first of the largest samples of each bin, (C, PH, PW, 1)."""
    return torch.as_tensor(values.detach().numpy().argmax(-1))[..., None]


class RoIAlignMax(RoIAlignOperator[RoIAlignMaxCase]):
    """Max pooling of bilinear samples; rois are not differentiated.

    An image is drawn until no rounding can decide which of two different samples is the larger one; where all of
    an image's samples are exact, they may be equal.
    """

    name = "roi_align_max"
    case_type = RoIAlignMaxCase
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
        "size": ((7, 9), (1, 6), (16, 12)),
        "rois": (4, 1),
        "output_size": ((2, 3), (3, 1)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0, 3),
        "aligned": (True, False),
        "layout": ("contiguous", "channels_last", "sliced"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer", "negative"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64", "float32", "float16"),
        "batch": (2,),
        "channels": (3,),
        "size": ((7, 9),),
        "rois": (4,),
        "output_size": ((2, 3), (3, 2)),
        "scale": (1, 4, 3),
        "sampling_ratio": (2, 0),
        "aligned": (True, False),
        "layout": ("contiguous", "channels_last"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer", "negative"),
    }

    def smooth(self, case: RoIAlignMaxCase) -> bool:
        return super().smooth(case) and case.data == "real"

    def settle(
        self, case: RoIAlignMaxCase, random: np.random.Generator, image: Tensor, rois: Tensor
    ) -> Tensor:
        planes = torch.ones(case.batch, case.channels, dtype=torch.bool)
        # A plane that must be drawn again is so of reals, whose values are hardly ever equal.
        data = case.data if case.data == "negative" else "real"
        again = type(case)(dtype=case.dtype, data=data)
        for _ in range(1000):
            planes = self._undecided(case, image, rois, planes)
            if not bool(planes.any()):
                return image
            image[planes] = draw_image(again, random, (int(planes.sum()), *case.size))
        raise RuntimeError(f"{case.id}: no image decides every bin")

    def _undecided(self, case: RoIAlignMaxCase, image: Tensor, rois: Tensor, planes: Tensor) -> Tensor:
        """Which of the ``planes`` (N, C) have a bin with two different samples that rounding might swap."""
        found = torch.zeros_like(planes)
        unit = BILINEAR_ROUNDINGS * unit_roundoff(accumulation_dtype(DTYPES[case.dtype]))
        for roi in rois:
            n = int(roi[0])
            channels = torch.nonzero(planes[n])[:, 0]
            if len(channels) == 0 or sample_count(case, roi) == 0 or is_exact(case, roi):
                continue
            chosen = image[n, channels].double()
            value = sample_values(case, roi, chosen, Arithmetic.SIGNED)
            error = unit * sample_values(case, roi, chosen.abs(), Arithmetic.MAJORANT)
            best = winners(value)
            near = value.gather(-1, best) - value <= error + error.gather(-1, best) + FINITE_STEP
            place = _places(case, roi).expand(*value.shape, 2)
            same = (place == place.gather(-2, best[..., None].expand(*best.shape, 2))).all(-1)
            found[n, channels] |= (near & ~same).flatten(1).any(1)
        return found

    def oracle(
        self, case: RoIAlignMaxCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
    ) -> Tensor:
        image = arithmetic.of(tensors["input"])
        # The empty sum keeps the output attached to the input, so that its gradient is zero, not absent.
        empty = image.sum() * 0
        pooled = []
        for roi in tensors["rois"]:
            n = int(roi[0])
            if sample_count(case, roi) == 0:
                pooled.append(empty.expand(case.channels, *case.output_size))
                continue
            best = winners(sample_values(case, roi, tensors["input"][n], Arithmetic.SIGNED))
            pooled.append(sample_values(case, roi, image[n], arithmetic).gather(-1, best)[..., 0])
        shape = (case.rois, case.channels, *case.output_size)
        return (torch.stack(pooled) + empty) if pooled else empty.expand(shape)

    def roundings(self, case: RoIAlignMaxCase, tensors: Tensors) -> dict[str, int]:
        # Each bin adds its winner to four pixels, at the border all four to the same one.
        return {"output": BILINEAR_ROUNDINGS, "grad:input": BILINEAR_ROUNDINGS + 4 * case.rois * case.bins}

    def quantum(self, case: RoIAlignMaxCase) -> float:
        return weight_quantum(self, case, is_mean=False) / 4 if case.data == "integer" else 0.0


def _places(case: RoIAlignMaxCase, roi: Tensor) -> Tensor:
    """Where the samples of each bin really read, (1, PH, PW, samples, 2): all those outside at one place."""
    grids = []
    for axis in (0, 1):
        y = torch.as_tensor(bin_samples(case, roi, axis).positions)
        length = case.size[axis]
        grids.append((y.clamp(0, length - 1), (y >= -1) & (y <= length)))
    (y, in_y), (x, in_x) = grids
    shape = (*y.shape[:1], *x.shape[:1], *y.shape[1:], *x.shape[1:])
    inside = (in_y[:, None, :, None] & in_x[None, :, None, :]).expand(shape)
    both = [y[:, None, :, None].expand(shape), x[None, :, None, :].expand(shape)]
    return torch.stack([torch.where(inside, axis, -9.0) for axis in both], -1).flatten(2, 3)[None]


OPERATOR = RoIAlignMax()
