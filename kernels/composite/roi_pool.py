"""RoIPool by gathering every bin's pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.autocast import float32_under_autocast


@float32_under_autocast
def roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """`kernels.roi_pool`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same.
    """
    rois, size = checks.roi_pool(input, boxes, output_size, spatial_scale)
    checks.batch_indices(rois, input.shape[0])
    return pool(input, rois, size, spatial_scale, True, _largest)


def pool_and_argmax(
    input: Tensor, rois: Tensor, output_size: checks.Pair, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    """`kernels.roi_pool.pool_and_argmax`, for arguments that were checked before but for the batch indices."""
    checks.batch_indices(rois, input.shape[0])
    image = input.float() if input.dtype.itemsize == 2 else input
    # The number of a pixel may be beyond what its dtype can count; its row and column, from 1, are not.
    y, x = (torch.arange(1, length + 1, device=image.device, dtype=image.dtype) for length in image.shape[2:])
    planes = torch.cat([image, y[:, None].expand_as(image), x.expand_as(image)], dim=1)
    output, row, column = pool(planes, rois, output_size, spatial_scale, True, _largest_of_three).chunk(3, 1)
    argmax = torch.where(row > 0, (row.long() - 1) * image.shape[3] + column.long() - 1, -1)
    return output.to(input.dtype), argmax


def pool(
    input: Tensor,
    rois: Tensor,
    output_size: checks.Pair,
    spatial_scale: float,
    last_included: bool,
    reduce: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The same for arguments that were checked before.

    `reduce` makes (C, PH, PW) of (C, PH, PW, pixels) and of whether each of these belongs to the bin, which may be
    none. `last_included`: whether the pixel at a box's end belongs to it. An input of (N, C, PH, PW, H, W) is
    position-sensitive.
    """
    dtype = input.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    image = input.to(wide)
    pooled = []
    # One by one, because their bins differ in size.
    for roi in rois.detach().to(wide):
        _, x1, y1, x2, y2 = roi * float(spatial_scale)
        rows, in_rows = _pixels(y1, y2, output_size[0], image.shape[-2], last_included)
        columns, in_columns = _pixels(x1, x2, output_size[1], image.shape[-1], last_included)
        chosen = (in_rows[:, :, None, None] & in_columns).transpose(1, 2).flatten(2)
        planes = image[roi[0].long()]
        if image.dim() == 4:
            values = planes[:, rows[:, :, None, None], columns]
        else:
            bins = [torch.arange(bins, device=roi.device) for bins in output_size]
            values = planes[
                :, bins[0][:, None, None, None], bins[1][:, None], rows[:, :, None, None], columns
            ]
        values = values.transpose(2, 3).flatten(3)
        pooled.append(torch.where(chosen.any(-1), reduce(values, chosen), 0))
    empty = (image.sum() * 0 if not pooled else image.new_empty(())).expand(0, image.shape[1], *output_size)
    return torch.cat([empty, torch.stack(pooled)] if pooled else [empty]).to(dtype)


def _largest(values: Tensor, chosen: Tensor) -> Tensor:
    """NaN is larger than every number, and of equal ones the first wins."""
    candidates = torch.where(chosen, values.detach(), -torch.inf)
    return values.gather(3, candidates.argmax(3, keepdim=True))[..., 0]


def _largest_of_three(values: Tensor, chosen: Tensor) -> Tensor:
    """The same for the first third of the channels, and what the others have there."""
    candidates = torch.where(chosen, values[: len(values) // 3].detach(), -torch.inf)
    return values.gather(3, candidates.argmax(3, keepdim=True).repeat(3, 1, 1, 1))[..., 0]


def _pixels(low: Tensor, high: Tensor, bins: int, length: int, last_included: bool) -> tuple[Tensor, Tensor]:
    """The pixels (bins, n) of each bin along one axis, and which of them belong to it."""
    finite = torch.isfinite(low) & torch.isfinite(high)
    start, end = (_rounded(torch.where(finite, corner, 0)) for corner in (low, high))
    size = (end - start + int(last_included)).clamp_min(1)
    bin = torch.arange(bins, device=low.device)
    first = (start + (bin * size).div(bins, rounding_mode="floor")).clamp(0, length)
    last = (start - (-(bin + 1) * size).div(bins, rounding_mode="floor")).clamp(0, length)
    last = torch.where(finite, last, first)
    step = torch.arange(max(int((last - first).max()), 1), device=low.device)
    pixels = first[:, None] + step
    return pixels.clamp_max(length - 1), pixels < last[:, None]


def _rounded(coordinate: Tensor) -> Tensor:
    """Half away from zero, and no further than 2**30."""
    whole = coordinate.trunc()
    away = (coordinate - whole).abs() >= 0.5
    return torch.where(away, whole + coordinate.sign(), whole).clamp(-(2**30), 2**30).long()
