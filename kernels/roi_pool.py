"""RoIPool (Girshick, arXiv:1504.08083)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels import checks, library
from kernels.autocast import float32_under_autocast
from kernels.composite.roi_pool import pool_and_argmax as pool_and_argmax_by_gathering


@float32_under_autocast
def roi_pool(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:
    """The largest pixel in each bin of each box. The arguments' order is torchvision's.

    A box goes from pixel round(y1*spatial_scale) to pixel round(y2*spatial_scale), half away from zero and no
    further than +-2**30, and is at least one pixel large. Of n pixels, bin p of P holds those from floor(p*n/P) to
    before ceil((p+1)*n/P) that lie in the image; the same for x. Coordinates are computed in the tensors' dtype, in
    float32 for the 16-bit ones, and bins exactly.

    CPU tensors take the compiled operator, which is built at first use; other devices take
    `kernels.composite.roi_pool`. Differentiable by input to any order, in both modes and under torch.func; boxes get
    no gradient. Under torch.autocast it computes in float32 and returns input's dtype.

    Args:
        input: (N, C, H, W), float64, float32, float16 or bfloat16, any memory layout; N may be 0.
        boxes: (K, 5) with the image's number, x1, y1, x2, y2 in pixels, or one (L, 4) tensor per image
            without the number; in input's dtype. K may be 0.
        output_size: an int or (rows, columns) of bins.
        spatial_scale: pixels of input per unit of boxes.

    Of equal pixels the first in row-major order wins and gets the whole gradient; NaN is larger than every number.
    A bin without pixels is 0 and has no gradient; so is every bin of a box with a NaN or an infinity.

    Returns:
        (K, C, rows, columns), contiguous, in input's dtype.

    Raises:
        TypeError: an argument of a wrong type, or tensors of different dtypes.
        ValueError: wrong shapes, tensors on different devices, a box of no image, a value out of range.
        BuildError: the compiled operator can't be built here.
    """
    return pool_and_argmax(input, boxes, output_size, spatial_scale)[0]


def pool_and_argmax(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`roi_pool`, and which pixel each is: (K, C, rows, columns) of int64, y*W + x, -1 for an empty bin."""
    rois, size = checks.roi_pool(input, boxes, output_size, spatial_scale)
    if not library.serves(input.device):
        return pool_and_argmax_by_gathering(input, rois, size, spatial_scale)
    library.load()
    output, argmax = torch.ops.gradparity.roi_pool(input, rois.detach(), size, float(spatial_scale))
    return output, argmax


class RoIPool(nn.Module):
    """`roi_pool` with its settings. The arguments are torchvision's; ``forward(input, boxes)``.

    Raises TypeError and ValueError for wrong settings, at the call.
    """

    def __init__(self, output_size: int | tuple[int, int], spatial_scale: float) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale

    def forward(self, input: Tensor, boxes: Tensor | Sequence[Tensor]) -> Tensor:
        """Shapes and errors as in `roi_pool`."""
        return roi_pool(input, boxes, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"
