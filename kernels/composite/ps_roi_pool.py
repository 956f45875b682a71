"""PSRoIPool: the mean of RoIPool's bins, of a channel for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.autocast import float32_under_autocast
from kernels.composite.roi_pool import pool


@float32_under_autocast
def ps_roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """`kernels.ps_roi_pool`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same.
    """
    rois, size = checks.ps_roi_pool(input, boxes, output_size, spatial_scale)
    checks.batch_indices(rois, input.shape[0])
    return pool(torch.unflatten(input, 1, (-1, *size)), rois, size, spatial_scale, False, _mean)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, values, 0).sum(3) / chosen.sum(2).clamp_min(1)
