"""RoIAlign (He et al., arXiv:1703.06870)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels import checks, composite, library
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
    """The mean, or the largest, of bilinear samples in each bin of each box. The arguments' order is torchvision's.

    A sample at y < -1 or y > H is 0; otherwise y is clamped to the image, from 0 to H-1. The same for x.
    Computed in the tensors' dtype, in float32 for the 16-bit ones, and rounded once.

    CPU tensors take the compiled operator, which is built at first use; other devices take
    `kernels.composite.roi_align`. Differentiable by input, and with rois_grad by boxes, to any order, in both modes
    and under torch.func. Under torch.autocast it computes in float32 and returns input's dtype.

    Args:
        input: (N, C, H, W), float64, float32, float16 or bfloat16, any memory layout; N may be 0.
        boxes: (K, 5) with the image's number, x1, y1, x2, y2 in pixels, or one (L, 4) tensor per image
            without the number; in input's dtype. K may be 0.
        output_size: an int or (rows, columns) of bins.
        spatial_scale: pixels of input per unit of boxes.
        sampling_ratio: samples per bin along each axis, at most 1024; 0 and below mean ceil(box size / bins).
        aligned: whether pixel centres lie at half-integers. Without it, a box is at least one pixel large.
        mode: "avg", or "max" as in mmcv (which starts its maximum at -10). A sample outside counts as 0. Of equal
            samples the first in row-major order wins and gets the whole gradient; so does the first NaN.
        rois_grad: whether boxes get a gradient, that of the samples, which move with their box; the number of
            samples is constant. At a kink it is the slope of the cell to the right, and 0 where y is clamped
            (y < 0, y >= H-1) or the sample is outside. The image's number has gradient 0. Without it boxes that
            require a gradient get none, as in torchvision.

    A box with a NaN or an infinity has no samples, and a bin without samples is 0. So is one with more samples
    than the dtype can count: an adaptive box of 1e30 pixels. NaN in input spreads to every bin with a sample between
    whose four pixels it is, those of weight 0 included.

    Returns:
        (K, C, rows, columns), contiguous, in input's dtype.

    Raises:
        TypeError: an argument of a wrong type, or tensors of different dtypes.
        ValueError: wrong shapes, tensors on different devices, a box of no image, a value out of range.
        BuildError: the compiled operator can't be built here.
    """
    rois, size = checks.roi_align(
        input, boxes, output_size, spatial_scale, sampling_ratio, aligned, mode, rois_grad
    )
    if not library.serves(input.device):
        return composite.roi_align(
            input, rois, size, spatial_scale, sampling_ratio, aligned, mode=mode, rois_grad=rois_grad
        )
    library.load()
    rois = rois if rois_grad else rois.detach()
    settings = (size, float(spatial_scale), sampling_ratio, aligned)
    out: Tensor
    if mode == "max":
        out, _ = torch.ops.gradparity.roi_align_max(input, rois, *settings)
    else:
        out = torch.ops.gradparity.roi_align(input, rois, None, None, None, *settings)
    return out


class RoIAlign(nn.Module):
    """`roi_align` with its settings. The arguments are torchvision's; ``forward(input, boxes)``.

    Raises TypeError and ValueError for wrong settings, at the call.
    """

    def __init__(
        self,
        output_size: int | tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
        *,
        mode: str = "avg",
        rois_grad: bool = False,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned
        self.mode = mode
        self.rois_grad = rois_grad

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """Shapes and errors as in `roi_align`."""
        return roi_align(
            input,
            boxes,
            self.output_size,
            self.spatial_scale,
            self.sampling_ratio,
            self.aligned,
            mode=self.mode,
            rois_grad=self.rois_grad,
        )

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}, aligned={self.aligned}, mode={self.mode!r}, "
            f"rois_grad={self.rois_grad}"
        )
