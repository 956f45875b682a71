"""RoIAlign by gathering the four corners of every sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import checks


def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """`kernels.roi_align`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same; boxes get no gradient here either.
    """
    rois, size = checks.roi_align(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)
    checks.batch_indices(rois, input.shape[0])
    return compute(input, rois, size, float(spatial_scale), sampling_ratio, aligned)


def compute(
    input: Tensor,
    rois: Tensor,
    output_size: checks.Pair,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The same for arguments that were checked before."""
    dtype = input.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    rois = rois.detach().to(wide)
    image = input.to(wide)
    # Adaptive grids differ from roi to roi: padding all to the largest could take any amount of memory.
    parts = [rois] if sampling_ratio > 0 else list(torch.split(rois, 1))
    pooled = [_pool(image, part, output_size, spatial_scale, sampling_ratio, aligned) for part in parts]
    empty = image[:0, :, :1, :1].expand(0, -1, *output_size)
    return torch.cat([empty, *pooled]).to(dtype)


def _pool(
    image: Tensor,
    rois: Tensor,
    output_size: checks.Pair,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    batch = rois[:, 0].long()
    shift = 0.5 if aligned else 0.0
    x1, y1, x2, y2 = (rois[:, 1:] * spatial_scale - shift).unbind(1)
    y = _Axis(y1, y2, output_size[0], image.shape[2], sampling_ratio, aligned)
    x = _Axis(x1, x2, output_size[1], image.shape[3], sampling_ratio, aligned)

    def corner(rows: Tensor, columns: Tensor) -> Tensor:
        # (K, rows, columns, C), because the indexed dimensions come first
        return image[batch[:, None, None], :, rows[:, :, None], columns[:, None, :]]

    def weight(rows: Tensor, columns: Tensor) -> Tensor:
        return (rows[:, :, None] * columns[:, None, :])[..., None]

    sampled = (
        weight(y.low_weight, x.low_weight) * corner(y.low, x.low)
        + weight(y.low_weight, x.high_weight) * corner(y.low, x.high)
        + weight(y.high_weight, x.low_weight) * corner(y.high, x.low)
        + weight(y.high_weight, x.high_weight) * corner(y.high, x.high)
    )
    inside = y.inside[:, :, None] & x.inside[:, None, :]
    sampled = torch.where(inside[..., None], sampled, 0)
    shape = (rois.shape[0], output_size[0], y.samples, output_size[1], x.samples, image.shape[1])
    total = sampled.reshape(shape).sum((2, 4)).permute(0, 3, 1, 2)
    count = (y.grid * x.grid).view(-1, 1, 1, 1)
    usable = torch.isfinite(count) & (count != 0)
    return torch.where(usable, total / torch.where(usable, count, 1), 0)


class _Axis:
    """Samples of every roi along one axis, `bins` times `samples` of them, those far from the image left out.

    A sample lies between the pixels `low` and `high`, which count with `low_weight` and `high_weight`.
    """

    def __init__(
        self, start: Tensor, end: Tensor, bins: int, length: int, sampling_ratio: int, aligned: bool
    ) -> None:
        size = end - start
        if not aligned:
            size = size.clamp_min(1)
        finite = torch.isfinite(start) & torch.isfinite(end)
        start, size = torch.where(finite, start, 0), torch.where(finite, size, 0)
        bin_size = size / bins
        grid = torch.full_like(size, sampling_ratio) if sampling_ratio > 0 else bin_size.ceil()
        self.grid = torch.where(finite, grid, 0)
        bin_start = (
            start[:, None] + torch.arange(bins, device=start.device, dtype=start.dtype) * bin_size[:, None]
        )
        first, samples = _near(bin_start, bin_size / self.grid, self.grid, length)
        self.samples = int(samples.max()) if samples.numel() else 0

        step = torch.arange(self.samples, device=start.device)
        number = (first[..., None] + step).to(start.dtype)
        bin_size, grid = bin_size[:, None, None], self.grid[:, None, None]
        position = (bin_start[..., None] + (number + 0.5) * bin_size / grid).flatten(1)
        chosen = (step < samples[..., None]).flatten(1)
        self.inside = chosen & (position >= -1) & (position <= length)

        position = torch.where(self.inside, position, 0).clamp_min(0)
        last = position >= length - 1
        self.low = torch.where(last, length - 1, position.floor().long().clamp_max(length - 1))
        self.high = torch.where(last, length - 1, self.low + 1)
        self.high_weight = torch.where(last, 0, position - self.low.to(position.dtype))
        self.low_weight = 1 - self.high_weight


def _near(bin_start: Tensor, step: Tensor, grid: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first sample of each bin that may lie within [-1, length], and how many from there on may.

    In float64 whatever the dtype, so that every kernel visits the same samples. One sample more on
    either side makes up for rounding. Bins without any, or at positions that aren't finite, have 0.
    """
    bin_start, step, grid = (value.double() for value in (bin_start, step[:, None], grid[:, None]))
    one, other = (-1 - bin_start) / step - 0.5, (length - bin_start) / step - 0.5
    # A step of 0 puts all samples of a bin at one place.
    everywhere = step == 0
    lowest = torch.where(everywhere, 0, torch.minimum(one, other).floor() - 1)
    highest = torch.where(everywhere, grid, torch.maximum(one, other).ceil() + 1)
    first = lowest.clamp_min(0)
    samples = torch.minimum(highest, grid - 1) - first + 1
    usable = torch.isfinite(bin_start) & torch.isfinite(step) & torch.isfinite(first) & (samples > 0)
    return torch.where(usable, first, 0), torch.where(usable, samples, 0).long()
