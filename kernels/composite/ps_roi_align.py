"""PSRoIAlign: RoIAlign's samples of other channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.autocast import float32_under_autocast
from kernels.composite.roi_align import mean, pool


@float32_under_autocast
def ps_roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
) -> Tensor:
    """`kernels.ps_roi_align`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same.
    """
    rois, size = checks.ps_roi_align(input, boxes, output_size, spatial_scale, sampling_ratio)
    checks.batch_indices(rois, input.shape[0])
    planes = torch.unflatten(input, 1, (-1, *size))
    return pool(planes, rois.detach(), size, spatial_scale, sampling_ratio, True, mean)
