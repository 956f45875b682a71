"""RoIAlign by gathering the four corners of every sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import checks
from kernels.autocast import float32_under_autocast


@float32_under_autocast
def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
    *,
    mode: str = "avg",
    rois_grad: bool = False,
) -> Tensor:
    """`kernels.roi_align`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same.
    """
    rois, size = checks.roi_align(
        input, boxes, output_size, spatial_scale, sampling_ratio, aligned, mode, rois_grad
    )
    checks.batch_indices(rois, input.shape[0])
    rois = rois if rois_grad else rois.detach()
    reduce = mean if mode == "avg" else _largest
    return pool(input, rois, size, spatial_scale, sampling_ratio, aligned, reduce)


def pool(
    input: Tensor,
    rois: Tensor,
    output_size: checks.Pair,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    reduce: Callable[[Tensor, _Axis, _Axis], Tensor],
) -> Tensor:
    """The same for arguments that were checked before.

    `reduce` makes (K, C, PH, PW) of samples (K, C, PH, samples, PW, samples) and their axes. An input of
    (N, C, PH, PW, H, W) is position-sensitive.
    """
    dtype = input.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    rois = rois.to(wide)
    image = input.to(wide)
    # Adaptive grids differ from roi to roi: padding all to the largest could take any amount of memory.
    parts = [rois] if sampling_ratio > 0 else list(torch.split(rois, 1))
    pooled = []
    for part in parts:
        x1, y1, x2, y2 = part[:, 1:].unbind(1)
        y = _Axis(y1, y2, output_size[0], image.shape[-2], float(spatial_scale), sampling_ratio, aligned)
        x = _Axis(x1, x2, output_size[1], image.shape[-1], float(spatial_scale), sampling_ratio, aligned)
        pooled.append(reduce(_sample(image, part[:, 0].detach().long(), y, x), y, x))
    return torch.cat(pooled).to(dtype)


def _sample(image: Tensor, batch: Tensor, y: _Axis, x: _Axis) -> Tensor:
    """(K, C, PH, samples, PW, samples), 0 outside."""

    def corner(rows: Tensor, columns: Tensor) -> Tensor:
        # (K, rows, columns, C), because the indexed dimensions come first
        indices = batch[:, None, None], rows[:, :, None], columns[:, None, :]
        if image.dim() == 4:
            return image[indices[0], :, indices[1], indices[2]]
        return image[indices[0], :, y.bin[:, None], x.bin[None, :], indices[1], indices[2]]

    def weight(rows: Tensor, columns: Tensor) -> Tensor:
        return (rows[:, :, None] * columns[:, None, :])[..., None]

    sampled = (
        weight(y.low_weight, x.low_weight) * corner(y.low, x.low)
        + weight(y.low_weight, x.high_weight) * corner(y.low, x.high)
        + weight(y.high_weight, x.low_weight) * corner(y.high, x.low)
        + weight(y.high_weight, x.high_weight) * corner(y.high, x.high)
    )
    inside = y.inside[:, :, None] & x.inside[:, None, :]
    sampled = torch.where(inside[..., None], sampled, 0).movedim(-1, 1)
    return torch.unflatten(torch.unflatten(sampled, 3, (-1, x.samples)), 2, (-1, y.samples))


def mean(sampled: Tensor, y: _Axis, x: _Axis) -> Tensor:
    """The mean over all samples of a bin, those outside included; 0 if their number makes no sense."""
    count = (y.grid * x.grid).view(-1, 1, 1, 1)
    usable = torch.isfinite(count) & (count != 0)
    return torch.where(usable, sampled.sum((3, 5)) / torch.where(usable, count, 1), 0)


def _largest(sampled: Tensor, y: _Axis, x: _Axis) -> Tensor:
    """NaN is larger than every number, and of equal ones the first wins."""
    count = (y.grid * x.grid).view(-1, 1, 1, 1)
    exists = y.exists[:, None, :, :, None, None] & x.exists[:, None, None, None, :, :]
    values = sampled.transpose(3, 4).flatten(4)
    candidates = torch.where(exists, sampled.detach(), -torch.inf).transpose(3, 4).flatten(4)
    found = values.gather(4, candidates.argmax(4, keepdim=True))[..., 0]
    usable = torch.isfinite(count) & exists.transpose(3, 4).flatten(4).any(4)
    return torch.where(usable, found, 0)


class _Axis:
    """Samples of every roi along one axis, `bins` times `samples` of them, those far from the image left out.

    A sample lies between the pixels `low` and `high`, which count with `low_weight` and `high_weight`.
    """

    def __init__(
        self,
        low: Tensor,
        high: Tensor,
        bins: int,
        length: int,
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
    ) -> None:
        shift = 0.5 if aligned else 0.0
        start, end = (corner.detach() * spatial_scale - shift for corner in (low, high))
        size = end - start
        widened = torch.zeros_like(size, dtype=torch.bool) if aligned else size < 1
        size = torch.where(widened, 1, size)
        finite = torch.isfinite(start) & torch.isfinite(end)
        start, size = torch.where(finite, start, 0), torch.where(finite, size, 0)
        bin_size = size / bins
        grid = torch.full_like(size, sampling_ratio) if sampling_ratio > 0 else bin_size.ceil()
        self.grid = torch.where(finite, grid, 0)
        bin = torch.arange(bins, device=start.device)
        bin_start = start[:, None] + bin.to(start.dtype) * bin_size[:, None]
        first, near = _near(bin_start, bin_size / self.grid, self.grid, length)
        # Of the samples left out before and after, all outside, one stands for each.
        before, after = (first > 0).long(), (first + near < self.grid[:, None]).long()
        samples = before + near + after
        self.samples = max(int(samples.max()) if samples.numel() else 0, 1)
        self.bin = bin.repeat_interleave(self.samples)

        step = torch.arange(self.samples, device=start.device)
        self.exists = step < samples[..., None]
        chosen = (step >= before[..., None]) & (step < (before + near)[..., None])
        number = (first[..., None] - before[..., None] + step).to(start.dtype)
        bin_size, grid = bin_size[:, None, None], torch.where(self.grid > 0, self.grid, 1)[:, None, None]
        position = (bin_start[..., None] + (number + 0.5) * bin_size / grid).flatten(1)
        self.inside = chosen.flatten(1) & (position >= -1) & (position <= length)

        # The same position once more, for its gradient. Both fractions from their own end: 1 - t loses what is small.
        bin = bin[:, None].to(start.dtype)
        by_low = ((bins - 1 - bin) + (grid - number - 0.5) / grid) / bins
        by_high = (bin + (number + 0.5) / grid) / bins
        fixed = widened[:, None, None]
        by_low, by_high = torch.where(fixed, 1, by_low), torch.where(fixed, 0, by_high)
        low, high = torch.where(finite, low, 0), torch.where(finite, high, 0)
        moving = (by_low * spatial_scale) * low[:, None, None] + (by_high * spatial_scale) * high[
            :, None, None
        ]
        moving = torch.where(self.inside, moving.flatten(1), 0)
        position = torch.where(self.inside, position, 0) + (moving - moving.detach())

        position = torch.where(position >= 0, position, 0)  # unlike clamp, with a slope at 0
        last = position.detach() >= length - 1
        floor = position.detach().floor().long().clamp_max(length - 1)
        self.low = torch.where(last, length - 1, floor)
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
