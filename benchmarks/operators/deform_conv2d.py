"""deform_conv2d with a mask, against the other providers, grid_sample, and a plain convolution as the floor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contest import Contest, provided

KERNEL = 3


@dataclass(frozen=True)
class Shape:
    """(N, C, H, W) with as many output channels, 3x3, padding 1, one group and one offset group."""

    batch: int
    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.channels}x{self.height}x{self.width}"


SHAPES = (Shape(1, 64, 56, 56), Shape(1, 64, 64, 64), Shape(2, 256, 28, 28), Shape(1, 256, 100, 152))


def by_grid_sample(input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The same operator by torch's grid_sample, whose double backward exists since torch 2.12."""
    n, _, height, width = input.shape
    taps = torch.arange(KERNEL) - 1
    moved = offset.view(n, KERNEL, KERNEL, 2, height, width)
    y = torch.arange(height).view(-1, 1) + taps.view(-1, 1, 1, 1) + moved[:, :, :, 0]
    x = torch.arange(width) + taps.view(-1, 1, 1) + moved[:, :, :, 1]
    grid = torch.stack((2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1), dim=-1)
    sampled = F.grid_sample(input, grid.view(n, -1, width, 2), align_corners=True)
    columns = sampled.view(n, -1, KERNEL**2, height, width) * mask.unsqueeze(1)
    out: Tensor = weight.flatten(1) @ columns.view(n, -1, height * width)
    return out.view(n, -1, height, width) + bias.view(-1, 1, 1)


def plain(input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """A convolution without offsets: what the matrix products alone cost."""
    return F.conv2d(input, weight, bias, padding=1)


def contest(shape: Shape, dtype: torch.dtype) -> Contest:
    """Everybody who has the operator here, on samples that keep clear of the pixels, where gradients jump."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*size: int, low: float = -1, high: float = 1) -> Tensor:
        return (torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)

    n, c, pixels = shape.batch, shape.channels, (shape.height, shape.width)
    whole = torch.randint(-2, 3, (n, 2 * KERNEL**2, *pixels), generator=generator)
    tensors = {
        "input": uniform(n, c, *pixels),
        "offset": (whole + uniform(*whole.shape, low=0.1, high=0.9)).to(dtype),
        "weight": uniform(c, c, KERNEL, KERNEL) / (KERNEL**2 * c) ** 0.5,
        "bias": uniform(c),
        "mask": uniform(n, KERNEL**2, *pixels, low=0),
    }
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    return Contest(
        operator="deform_conv2d",
        shape=str(shape),
        tensors=tensors,
        differentiated=tuple(tensors),
        contestants={**provided("deform_conv2d", **window), "grid_sample": by_grid_sample},
        floors={"conv2d": plain},
    )
