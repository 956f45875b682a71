"""PSRoIPool: RoIPool of position-sensitive channels (R-FCN, Dai et al., arXiv:1605.06409)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels import checks, composite, library
from kernels.autocast import float32_under_autocast


@float32_under_autocast
def ps_roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """The mean of the pixels in each bin of each box, of a channel for each bin. torchvision's arguments.

    A box goes from pixel round(y1*spatial_scale) to before pixel round(y2*spatial_scale), half away from zero and no
    further than +-2**30, and is at least one pixel large. Of n pixels, bin p of P holds those from floor(p*n/P) to
    before ceil((p+1)*n/P) that lie in the image; the same for x. Coordinates are computed in the tensors' dtype, in
    float32 for the 16-bit ones, and bins exactly; the mean is computed alike and rounded once. Bin (i, j) of output
    channel c reads input channel (c*rows + i)*columns + j.

    CPU tensors take the compiled operator, which is built at first use; other devices take
    `kernels.composite.ps_roi_pool`. Linear in input, differentiable by it to any order, in both modes and under
    torch.func; boxes get no gradient. Under torch.autocast it computes in float32 and returns input's dtype.

    Args:
        input: (N, C*rows*columns, H, W), float64, float32, float16 or bfloat16, any memory layout; N may be 0.
        boxes: (K, 5) with the image's number, x1, y1, x2, y2 in pixels, or one (L, 4) tensor per image
            without the number; in input's dtype. K may be 0.
        output_size: an int or (rows, columns) of bins.
        spatial_scale: pixels of input per unit of boxes.

    A bin without pixels is 0 and has no gradient; so is every bin of a box with a NaN or an infinity. NaN in input
    spreads to every bin that it is in. torchvision 0.29.1 leaves out the last row and column in its forward alone.

    Returns:
        (K, C, rows, columns), contiguous, in input's dtype.

    Raises:
        TypeError: an argument of a wrong type, or tensors of different dtypes.
        ValueError: wrong shapes, channels that the bins don't divide, tensors on different devices, a box of no
            image, a value out of range.
        BuildError: the compiled operator can't be built here.
    """
    rois, size = checks.ps_roi_pool(input, boxes, output_size, spatial_scale)
    if not library.serves(input.device):
        return composite.ps_roi_pool(input, rois, size, spatial_scale)
    library.load()
    out: Tensor = torch.ops.gradparity.ps_roi_pool(input, rois.detach(), size, float(spatial_scale))
    return out


class PSRoIPool(nn.Module):
    """`ps_roi_pool` with its settings. The arguments are torchvision's; ``forward(input, boxes)``.

    Raises TypeError and ValueError for wrong settings, at the call.
    """

    def __init__(self, output_size: int | tuple[int, int], spatial_scale: float) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """Shapes and errors as in `ps_roi_pool`."""
        return ps_roi_pool(input, boxes, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"
