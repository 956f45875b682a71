"""roi_align against the other providers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.contest import Contest, provided


@dataclass(frozen=True)
class Shape:
    """Boxes on a (2, C, H, W) pyramid level of stride 4, 7x7 bins of 2x2 samples, aligned."""

    rois: int
    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.rois} rois, 2x{self.channels}x{self.height}x{self.width}"


SHAPES = (Shape(512, 256, 50, 76), Shape(512, 256, 200, 304))


def contest(shape: Shape, dtype: torch.dtype) -> Contest:
    """Everybody who has the operator here, on boxes within the image."""
    generator = torch.Generator().manual_seed(0)
    image = torch.rand((2, shape.channels, shape.height, shape.width), generator=generator)
    corners = torch.rand((shape.rois, 2, 2), generator=generator).sort(dim=1).values
    corners = corners * torch.tensor([shape.width, shape.height]) * 4
    index = torch.arange(shape.rois).remainder(2).view(-1, 1)
    settings = {"output_size": (7, 7), "spatial_scale": 0.25, "sampling_ratio": 2, "aligned": True}
    return Contest(
        operator="roi_align",
        shape=str(shape),
        tensors={
            "input": image.to(dtype),
            "rois": torch.cat((index, corners.flatten(1)), dim=1).to(dtype),
        },
        differentiated=("input",),
        contestants=provided("roi_align", **settings),
    )
