"""The operators and modules of OpenMMLab's mmcv, any version, called the way its users call them.

Workers load this file: it runs on Python 3.6, and imports nothing of this project.
"""

import importlib
from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn


class Mmcv:
    """An mmcv that can be imported. The defaults that the protocol does not name stay its own (im2col_step is 32)."""

    name = "mmcv"
    promises_everything = False

    def load(self) -> str:
        """Imports mmcv.ops and returns mmcv's version, and whether the operators are a narrow build.

        Raises ImportError when that is not possible here.
        """
        _ops()  # here, because torch.compile can't trace an import_module
        version: str = importlib.import_module("mmcv").__version__
        narrow = type(importlib.import_module("mmcv._ext")).__name__ == "NarrowExtension"
        return f"{version} (narrow build)" if narrow else version

    def deform_conv2d(
        self,
        input: Tensor,
        offset: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        *,
        stride: Tuple[int, int],
        padding: Tuple[int, int],
        dilation: Tuple[int, int],
        mask: Optional[Tensor],
    ) -> Tensor:
        """`mmcv.ops.modulated_deform_conv2d` with a mask, `mmcv.ops.deform_conv2d` without.

        mmcv is told the groups, which follow from the shapes: input's channels over weight's, and offset's
        channels over two per kernel tap. Raises NotImplementedError for a bias without a mask.
        """
        if mask is None and bias is not None:
            raise NotImplementedError(
                "mmcv's deform_conv2d (DCNv1) takes no bias; only DCNv2, with a mask, does"
            )
        ops = _ops()
        groups = input.shape[1] // weight.shape[1]
        deform_groups = offset.shape[1] // (2 * weight.shape[2] * weight.shape[3])
        geometry = (stride, padding, dilation, groups, deform_groups)
        if mask is None:
            v1: Tensor = ops.deform_conv2d(input, offset, weight, *geometry)
            return v1
        v2: Tensor = ops.modulated_deform_conv2d(input, offset, mask, weight, bias, *geometry)
        return v2

    def roi_align(
        self, input: Tensor, rois: Tensor, *, output_size: Tuple[int, int], **arguments: Any
    ) -> Tensor:
        """`mmcv.ops.RoIAlign` in mode 'avg', where adaptive sampling is spelled 0."""
        output: Tensor = _ops().RoIAlign(output_size, pool_mode="avg", **arguments)(input, rois)
        return output

    def roi_align_max(
        self, input: Tensor, rois: Tensor, *, output_size: Tuple[int, int], **arguments: Any
    ) -> Tensor:
        """`mmcv.ops.RoIAlign` in mode 'max'."""
        output: Tensor = _ops().RoIAlign(output_size, pool_mode="max", **arguments)(input, rois)
        return output

    def deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, offset_groups: int, **layer: Any
    ) -> nn.Module:
        """`mmcv.ops.DeformConv2dPack`, which has no bias."""
        return _layer("DeformConv2dPack", in_channels, out_channels, deform_groups=offset_groups, **layer)

    def modulated_deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, offset_groups: int, **layer: Any
    ) -> nn.Module:
        """`mmcv.ops.ModulatedDeformConv2dPack`."""
        return _layer(
            "ModulatedDeformConv2dPack", in_channels, out_channels, deform_groups=offset_groups, **layer
        )


def _layer(
    name: str, *channels: int, dtype: torch.dtype, device: torch.device, **arguments: Any
) -> nn.Module:
    layer: nn.Module = getattr(_ops(), name)(*channels, **arguments)
    return layer.to(device=device, dtype=dtype)


_found: Any = None


def _ops() -> Any:
    """The module `mmcv.ops`, imported at first use."""
    global _found
    if _found is None:
        _found = importlib.import_module("mmcv.ops")
    return _found


PROVIDER = Mmcv()
