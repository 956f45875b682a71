"""Deformable convolution, v1 (Dai et al., arXiv:1703.06211) and v2 (Zhu et al., arXiv:1811.11168)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels import checks, composite, library
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
    """Deformable convolution, v2 with a mask and v1 without one. The arguments' order is torchvision's.

    Tap (ky, kx) of output pixel (oy, ox) samples the image bilinearly, with zeros around it, at
    ``y = oy*stride - padding + ky*dilation + offset_y`` and the same for x; y and x are rounded once, to the
    tensors' dtype. Everything else is computed in that dtype, in float32 for the 16-bit ones, and the result
    is rounded once.

    CPU tensors take the compiled operator, which is built at first use; other devices take
    `kernels.composite.deform_conv2d`. Differentiable to any order by every tensor, in both modes and under torch.func:
    to second order by compiled kernels, beyond by the composite. Under torch.autocast it computes in float32 and
    returns input's dtype.

    Args:
        input: (N, C, H, W), float64, float32, float16 or bfloat16, any memory layout; N may be 0.
        offset: (N, 2*OG*kh*kw, oh, ow) in pixels, tap by tap, y before x. OG offset groups split the channels
            of input.
        weight: (O, C/groups, kh, kw).
        bias: (O,).
        stride, padding, dilation: an int or (vertical, horizontal), in pixels.
        mask: (N, OG*kh*kw, oh, ow), the weight of each sample.
        boundary: whether a sample at exactly -1 counts. "open": it has value and gradient 0, as in mmcv and
            the papers' code. "closed": its offset has the gradient of the cell to its right, as in
            torchvision. A sample at exactly H (or W), or further out, has value and gradient 0 under both.

    A sample at a position that is NaN or infinite lies outside: it contributes 0 and has gradient 0. A mask's
    value outside the image has no effect, not even NaN. NaN in input, weight, bias and mask inside spreads
    wherever it is used; a sample uses the four pixels of its cell, those of weight 0 included.
    With an infinite mask or weight, a result that is not finite may be infinite or NaN.

    Returns:
        (N, O, oh, ow), contiguous, in input's dtype.

    Raises:
        TypeError: an argument of a wrong type, or tensors of different dtypes.
        ValueError: shapes that don't fit together, tensors on different devices, a value out of range.
        BuildError: the compiled operator can't be built here.
    """
    closed = checks.boundary(boundary)
    window = checks.Window(
        checks.pair("stride", stride, 1),
        checks.pair("padding", padding, 0),
        checks.pair("dilation", dilation, 1),
    )
    checks.deform_conv2d(input, offset, weight, bias, window, mask)
    if not library.serves(input.device):
        return composite.deform_conv2d(input, offset, weight, bias, *window, mask, boundary=boundary)
    library.load()
    out: Tensor = torch.ops.gradparity.deform_conv2d(input, offset, weight, mask, bias, *window, closed)
    return out


class DeformConv2d(nn.Module):
    """`deform_conv2d` with its weight and bias as parameters. The arguments are torchvision's.

    ``forward(input, offset, mask=None)``. weight is (out_channels, in_channels/groups, kh, kw), uniform
    within +-1/sqrt(fan_in) with fan_in = in_channels/groups*kh*kw, and so is bias, (out_channels,).

    Raises ValueError for channels that groups don't divide, TypeError and ValueError for other wrong values.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        boundary: str = "open",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.channels(in_channels, out_channels, groups)
        checks.boundary(boundary)
        checks.parameters(bias, dtype)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = checks.pair("kernel_size", kernel_size, 1)
        self.stride = checks.pair("stride", stride, 1)
        self.padding = checks.pair("padding", padding, 0)
        self.dilation = checks.pair("dilation", dilation, 1)
        self.boundary = boundary
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shapes and errors as in `deform_conv2d`."""
        return deform_conv2d(
            input,
            offset,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            mask,
            boundary=self.boundary,
        )

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}, boundary={self.boundary!r}"
        )
