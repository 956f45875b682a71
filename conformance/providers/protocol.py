"""What a provider is: an implementation of the operators, judged like every other one.

A provider has one method per operator, under the operator's name; a missing method is `unsupported`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class UnavailableError(Exception):
    """The provider can't be used here; the message says why in one sentence."""


class Provider(Protocol):
    """A named implementation. Operators that it lacks are simply not defined.

    ``name`` stands in every record. ``promises_everything`` turns a refusal of a valid case into a defect. What it
    does not promise, it is not asked: an attribute ``not_promised`` maps OPERATOR/QUANTITY patterns, such as
    "*roi*/vmap*:rois", to reasons.
    """

    name: str
    promises_everything: bool

    def load(self) -> str:
        """Makes the implementation ready (imports, builds) and returns its version.

        Raises UnavailableError with the reason when that is not possible here.
        """
        ...


class Operators(Protocol):
    """The signatures of all operators; a provider defines any subset of them."""

    def deform_conv2d(
        self,
        input: Tensor,
        offset: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        mask: Tensor | None,
    ) -> Tensor:
        """Shapes as in `cases/operators/deform_conv2d.py`; mask None is DCNv1, a tensor is DCNv2."""
        ...

    def roi_align(
        self,
        input: Tensor,
        rois: Tensor,
        *,
        output_size: tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
    ) -> Tensor:
        """rois is (K, 5); sampling_ratio 0 means adaptive."""
        ...

    def roi_align_max(
        self,
        input: Tensor,
        rois: Tensor,
        *,
        output_size: tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
    ) -> Tensor:
        """The largest sample of each bin instead of the mean."""
        ...

    def roi_align_rois_grad(
        self,
        input: Tensor,
        rois: Tensor,
        *,
        output_size: tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool,
    ) -> Tensor:
        """roi_align that is differentiable by rois too."""
        ...

    def roi_pool(
        self, input: Tensor, rois: Tensor, *, output_size: tuple[int, int], spatial_scale: float
    ) -> Tensor:
        """The largest pixel of each bin."""
        ...

    def ps_roi_align(
        self,
        input: Tensor,
        rois: Tensor,
        *,
        output_size: tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int,
    ) -> Tensor:
        """input is (N, C*PH*PW, H, W), the result (K, C, PH, PW); sampling_ratio 0 means adaptive."""
        ...

    def ps_roi_pool(
        self, input: Tensor, rois: Tensor, *, output_size: tuple[int, int], spatial_scale: float
    ) -> Tensor:
        """input is (N, C*PH*PW, H, W), the result (K, C, PH, PW)."""
        ...

    def deform_conv2d_pack(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
        offset_groups: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> nn.Module:
        """The DCNv1 pack: parameters weight, conv_offset.weight, conv_offset.bias."""
        ...

    def modulated_deform_conv2d_pack(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
        offset_groups: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> nn.Module:
        """The DCNv2 pack: weight, bias (unless bias is False), conv_offset.weight, conv_offset.bias."""
        ...
