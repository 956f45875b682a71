"""Deformable convolution, v1 and v2, by gathering the four corners of every sample."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks
from kernels.autocast import float32_under_autocast


@float32_under_autocast
def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = (1, 1),
    padding: int | tuple[int, int] = (0, 0),
    dilation: int | tuple[int, int] = (1, 1),
    mask: Tensor | None = None,
    *,
    boundary: str = "open",
) -> Tensor:
    """`kernels.deform_conv2d`, on any device and differentiable to any order: see there for everything else.

    Shapes, dtypes, conventions and errors are the same. It holds four values per sample and channel.
    """
    closed = checks.boundary(boundary)
    window = checks.Window(
        checks.pair("stride", stride, 1),
        checks.pair("padding", padding, 0),
        checks.pair("dilation", dilation, 1),
    )
    checks.deform_conv2d(input, offset, weight, bias, window, mask)
    return compute(input, offset, weight, mask, bias, window, closed)


def compute(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    window: checks.Window,
    closed: bool,
) -> Tensor:
    """The same for arguments that were checked before."""
    dtype = input.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    n, c, h, w = input.shape
    o, c_per_group, kh, kw = weight.shape
    taps = kh * kw
    groups, offset_groups = c // c_per_group, offset.shape[1] // (2 * taps)
    rows, columns = offset.shape[2:]

    moved = offset.to(wide).reshape(n, offset_groups, kh, kw, 2, rows, columns)
    base_y = _base(rows, kh, 0, window, moved).view(kh, 1, rows, 1)
    base_x = _base(columns, kw, 1, window, moved).view(1, kw, 1, columns)
    y = _rounded(base_y + moved[:, :, :, :, 0], dtype).flatten(2)
    x = _rounded(base_x + moved[:, :, :, :, 1], dtype).flatten(2)

    # Positive tests, so that NaN is outside. At L itself both corners are zero anyway.
    inside = (y >= -1 if closed else y > -1) & (y < h) & (x >= -1 if closed else x > -1) & (x < w)
    y, x = torch.where(inside, y, 0), torch.where(inside, x, 0)
    y_low, x_low = y.detach().floor(), x.detach().floor()
    ly, lx = y - y_low, x - x_low
    hy, hx = 1 - ly, 1 - lx
    top, left = y_low.long(), x_low.long()

    pixels = input.to(wide).reshape(n, offset_groups, c // offset_groups, h * w)

    def corner(row: Tensor, column: Tensor) -> Tensor:
        valid = inside & (row >= 0) & (row < h) & (column >= 0) & (column < w)
        index = torch.where(valid, row * w + column, 0)[:, :, None]
        found = pixels.gather(3, index.expand(-1, -1, pixels.shape[2], -1))
        return torch.where(valid[:, :, None], found, 0)

    sampled = (
        (hy * hx)[:, :, None] * corner(top, left)
        + (hy * lx)[:, :, None] * corner(top, left + 1)
        + (ly * hx)[:, :, None] * corner(top + 1, left)
        + (ly * lx)[:, :, None] * corner(top + 1, left + 1)
    )
    if mask is not None:
        # Outside there is nothing that a mask could weigh, not even with NaN.
        weighed = torch.where(inside, mask.to(wide).reshape(y.shape), 0)
        sampled = weighed[:, :, None] * sampled

    columns_matrix = sampled.reshape(n, groups, c_per_group * taps, rows * columns)
    kernel = weight.to(wide).reshape(groups, o // groups, c_per_group * taps)
    out = (kernel @ columns_matrix).reshape(n, o, rows, columns)
    if bias is not None:
        out = out + bias.to(wide).view(-1, 1, 1)
    return out.to(dtype)


def _base(length: int, kernel: int, axis: int, window: checks.Window, like: Tensor) -> Tensor:
    """(kernel, length): where each tap of each output row or column sits without its offset."""
    start = torch.arange(length, device=like.device) * window.stride[axis] - window.padding[axis]
    tap = torch.arange(kernel, device=like.device) * window.dilation[axis]
    return (tap[:, None] + start[None, :]).to(like.dtype)


def _rounded(coordinate: Tensor, dtype: torch.dtype) -> Tensor:
    """The coordinate as `dtype` holds it; its gradient passes as if nothing had been rounded."""
    if coordinate.dtype == dtype:
        return coordinate
    exact = coordinate.detach()
    return coordinate + (exact.to(dtype).to(exact.dtype) - exact)
