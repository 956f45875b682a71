"""PSRoIAlign: RoIAlign (He et al., arXiv:1703.06870) of position-sensitive channels (Dai et al., arXiv:1605.06409)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels import checks, composite, library
from kernels.autocast import float32_under_autocast


@float32_under_autocast
def ps_roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
) -> Tensor:
    """The mean of bilinear samples in each bin of each box, of a channel for each bin. torchvision's arguments.

    The samples are those of `roi_align` with ``aligned=True``. Bin (i, j) of output channel c reads input channel
    (c*rows + i)*columns + j. Computed in the tensors' dtype, in float32 for the 16-bit ones, and rounded once.

    CPU tensors take the compiled operator, which is built at first use; other devices take
    `kernels.composite.ps_roi_align`. Linear in input, differentiable by it to any order, in both modes and under
    torch.func; boxes get no gradient. Under torch.autocast it computes in float32 and returns input's dtype.

    Args:
        input: (N, C*rows*columns, H, W), float64, float32, float16 or bfloat16, any memory layout; N may be 0.
        boxes: (K, 5) with the image's number, x1, y1, x2, y2 in pixels, or one (L, 4) tensor per image
            without the number; in input's dtype. K may be 0.
        output_size: an int or (rows, columns) of bins.
        spatial_scale: pixels of input per unit of boxes.
        sampling_ratio: samples per bin along each axis, at most 1024; 0 and below mean ceil(box size / bins).

    A box with a NaN or an infinity has no samples, and a bin without samples is 0 (torchvision divides 0 by 0). So
    is one with more samples than the dtype can count. NaN in input spreads as in `roi_align`.

    Returns:
        (K, C, rows, columns), contiguous, in input's dtype.

    Raises:
        TypeError: an argument of a wrong type, or tensors of different dtypes.
        ValueError: wrong shapes, channels that the bins don't divide, tensors on different devices, a box of no
            image, a value out of range.
        BuildError: the compiled operator can't be built here.
    """
    rois, size = checks.ps_roi_align(input, boxes, output_size, spatial_scale, sampling_ratio)
    if not library.serves(input.device):
        return composite.ps_roi_align(input, rois, size, spatial_scale, sampling_ratio)
    library.load()
    out: Tensor = torch.ops.gradparity.ps_roi_align(
        input, rois.detach(), size, float(spatial_scale), sampling_ratio
    )
    return out


class PSRoIAlign(nn.Module):
    """`ps_roi_align` with its settings. The arguments are torchvision's; ``forward(input, boxes)``.

    Raises TypeError and ValueError for wrong settings, at the call.
    """

    def __init__(self, output_size: int | tuple[int, int], spatial_scale: float, sampling_ratio: int) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """Shapes and errors as in `ps_roi_align`."""
        return ps_roi_align(input, boxes, self.output_size, self.spatial_scale, self.sampling_ratio)

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale}, "
            f"sampling_ratio={self.sampling_ratio}"
        )
