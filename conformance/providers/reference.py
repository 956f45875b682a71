"""The provider `reference`: this project's own kernels, compiled on CPU, with the open boundary."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

import kernels
from conformance.providers.protocol import UnavailableError
from kernels import library


class Reference:
    """`kernels`, which promise every case: a refusal is a defect."""

    name = "reference"
    promises_everything = True

    def load(self) -> str:
        """Builds the compiled operators. Raises UnavailableError with the build's own sentence."""
        try:
            library.load()
        except kernels.BuildError as error:
            raise UnavailableError(str(error)) from error
        return version("gradparity")

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        """`kernels.deform_conv2d`."""
        return kernels.deform_conv2d(input, offset, weight, bias, **arguments)

    def roi_align(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.roi_align`."""
        return kernels.roi_align(input, rois, **arguments)

    def roi_align_max(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.roi_align` in mode "max"."""
        return kernels.roi_align(input, rois, mode="max", **arguments)

    def roi_align_rois_grad(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.roi_align` with gradients for rois."""
        return kernels.roi_align(input, rois, rois_grad=True, **arguments)

    def roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.roi_pool`."""
        return kernels.roi_pool(input, rois, **arguments)

    def ps_roi_align(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.ps_roi_align`."""
        return kernels.ps_roi_align(input, rois, **arguments)

    def ps_roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.ps_roi_pool`."""
        return kernels.ps_roi_pool(input, rois, **arguments)

    def deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, offset_groups: int, **arguments: Any
    ) -> nn.Module:
        """`kernels.DeformConv2dPack`."""
        return kernels.DeformConv2dPack(in_channels, out_channels, deform_groups=offset_groups, **arguments)

    def modulated_deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, offset_groups: int, **arguments: Any
    ) -> nn.Module:
        """`kernels.ModulatedDeformConv2dPack`."""
        return kernels.ModulatedDeformConv2dPack(
            in_channels, out_channels, deform_groups=offset_groups, **arguments
        )


PROVIDER = Reference()
