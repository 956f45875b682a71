"""Deformable convolutions that compute their own offsets, with the constructors and state dicts of mmcv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernels import checks
from kernels.autocast import autocast_is_on
from kernels.deform_conv2d import deform_conv2d


def upgrade_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `state_dict` in which the packs of `module` have the names that they have today.

    Before version 2 of mmcv's packs, the offsets' convolution was stored as a sibling ("conv1_offset.weight"
    beside "conv1.weight"). mmcv's loader shows a pack its siblings, so that nothing needs to be done; torch's
    `load_state_dict` does not, and needs this first. All other keys stay as they are.
    """
    state = dict(state_dict)
    for name, child in module.named_modules():
        if isinstance(child, _Pack):
            _rename(state, f"{name}." if name else "")
    return state


def _rename(state_dict: dict[str, Any], prefix: str) -> None:
    for name in ("weight", "bias"):
        old, new = f"{prefix[:-1]}_offset.{name}", f"{prefix}conv_offset.{name}"
        if old in state_dict and new not in state_dict:
            state_dict[new] = state_dict.pop(old)


class _Pack(nn.Module):
    """What both versions share: weight, and a convolution that starts at zero and yields the offsets."""

    _version = 2
    _channels_per_tap: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int],
        padding: int | tuple[int, int],
        dilation: int | tuple[int, int],
        groups: int,
        deform_groups: int,
        bias: bool,
        boundary: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        checks.channels(in_channels, out_channels, groups)
        checks.offset_groups(deform_groups, in_channels)
        checks.boundary(boundary)
        checks.parameters(bias, dtype)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.groups, self.deform_groups = groups, deform_groups
        self.kernel_size = checks.pair("kernel_size", kernel_size, 1)
        self.stride = checks.pair("stride", stride, 1)
        self.padding = checks.pair("padding", padding, 0)
        self.dilation = checks.pair("dilation", dilation, 1)
        self.boundary = boundary

        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        taps = self.kernel_size[0] * self.kernel_size[1]
        self.conv_offset = nn.Conv2d(
            in_channels,
            self._channels_per_tap * deform_groups * taps,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            device=device,
            dtype=dtype,
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Draws weight from +-1/sqrt(in_channels*kh*kw); bias and conv_offset become zero."""
        bound = 1 / math.sqrt(self.in_channels * self.kernel_size[0] * self.kernel_size[1])
        nn.init.uniform_(self.weight, -bound, bound)
        for parameter in (self.bias, self.conv_offset.weight, self.conv_offset.bias):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def _predict(self, input: Tensor) -> Tensor:
        window = checks.Window(self.stride, self.padding, self.dilation)
        checks.layer_input(input, self.weight, self.groups, window)
        if input.dtype != self.weight.dtype and not autocast_is_on(input.device.type):
            raise TypeError(f"input must have the layer's dtype {self.weight.dtype}, got {input.dtype}")
        out: Tensor = self.conv_offset(input)
        return out

    def _convolve(self, input: Tensor, offset: Tensor, mask: Tensor | None) -> Tensor:
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

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            _rename(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def extra_repr(self) -> str:
        """The settings, as they were given."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"deform_groups={self.deform_groups}, bias={self.bias is not None}, boundary={self.boundary!r}"
        )


class DeformConv2dPack(_Pack):
    """Deformable convolution v1 whose offsets come from `conv_offset`, in mmcv's argument order.

    Parameters: weight (out_channels, in_channels/groups, kh, kw), conv_offset.weight and conv_offset.bias
    with 2*deform_groups*kh*kw outputs, zero at the start. ``forward(input)``: (N, C, H, W) -> (N, O, oh, ow).

    Args:
        bias: must be False; v1 has none.
        im2col_step: accepted and not used: batches of any size work.
        boundary: as in `deform_conv2d`.

    Raises TypeError and ValueError for wrong values.
    """

    _channels_per_tap = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        deform_groups: int = 1,
        bias: bool = False,
        im2col_step: int = 32,
        *,
        boundary: str = "open",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if bias is not False:
            raise ValueError(f"bias must be False, because deformable convolution v1 has none, got {bias!r}")
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            deform_groups,
            False,
            boundary,
            device,
            dtype,
        )
        self.im2col_step = im2col_step

    def forward(self, input: Tensor) -> Tensor:
        """Errors as in `deform_conv2d`."""
        return self._convolve(input, self._predict(input), None)


class ModulatedDeformConv2dPack(_Pack):
    """Deformable convolution v2 whose offsets and mask come from `conv_offset`, in mmcv's argument order.

    Parameters: weight (out_channels, in_channels/groups, kh, kw), bias (out_channels,) unless bias is False,
    conv_offset.weight and conv_offset.bias with 3*deform_groups*kh*kw outputs, zero at the start: two thirds
    are the offsets, the rest the mask before its sigmoid. ``forward(input)``: (N, C, H, W) -> (N, O, oh, ow).

    Raises TypeError and ValueError for wrong values.
    """

    _channels_per_tap = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        deform_groups: int = 1,
        bias: bool | str = True,
        *,
        boundary: str = "open",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            deform_groups,
            True if bias == "auto" else bias,  # type: ignore[arg-type]  # which means True in mmcv too
            boundary,
            device,
            dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Errors as in `deform_conv2d`."""
        out = self._predict(input)
        third = out.shape[1] // 3
        return self._convolve(input, out[:, : 2 * third], out[:, 2 * third :].sigmoid())
