"""The provider `torchvision`: the installed torchvision, with packs composed the way its users do.

Workers load this file too: it runs on Python 3.6 with any torchvision, and imports nothing of this project.
"""

import functools
import importlib
from typing import Any, Optional, Tuple, Type

import torch
from torch import Tensor, nn


class Torchvision:
    """The torchvision of this environment; it is never installed or replaced."""

    name = "torchvision"
    promises_everything = False

    def load(self) -> str:
        """Imports torchvision and returns its version.

        Raises ImportError when it is not there, or when its operators don't fit the torch installed.
        """
        version: str = _import().__version__
        return version

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Optional[Tensor], **arguments: Any
    ) -> Tensor:
        """`torchvision.ops.deform_conv2d`, which deduces both kinds of groups from the shapes."""
        output: Tensor = _ops().deform_conv2d(input, offset, weight, bias, **arguments)
        return output

    def roi_align(self, input: Tensor, rois: Tensor, *, sampling_ratio: int, **arguments: Any) -> Tensor:
        """`torchvision.ops.roi_align`, where adaptive sampling is spelled -1."""
        ratio = _sampling_ratio(sampling_ratio)
        output: Tensor = _ops().roi_align(input, rois, sampling_ratio=ratio, **arguments)
        return output

    def roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`torchvision.ops.roi_pool`."""
        output: Tensor = _ops().roi_pool(input, rois, **arguments)
        return output

    def ps_roi_align(self, input: Tensor, rois: Tensor, *, sampling_ratio: int, **arguments: Any) -> Tensor:
        """`torchvision.ops.ps_roi_align`, where adaptive sampling is spelled -1."""
        ratio = _sampling_ratio(sampling_ratio)
        output: Tensor = _ops().ps_roi_align(input, rois, sampling_ratio=ratio, **arguments)
        return output

    def ps_roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`torchvision.ops.ps_roi_pool`."""
        output: Tensor = _ops().ps_roi_pool(input, rois, **arguments)
        return output

    def deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, dtype: torch.dtype, device: torch.device, **layer: Any
    ) -> nn.Module:
        """`torchvision.ops.DeformConv2d` without bias, fed by a convolution of its input."""
        pack = _pack(modulated=False)(in_channels, out_channels, bias=False, **layer)
        return pack.to(device=device, dtype=dtype)

    def modulated_deform_conv2d_pack(
        self, in_channels: int, out_channels: int, *, dtype: torch.dtype, device: torch.device, **layer: Any
    ) -> nn.Module:
        """`torchvision.ops.DeformConv2d`, fed with offset and mask by a convolution of its input."""
        pack = _pack(modulated=True)(in_channels, out_channels, **layer)
        return pack.to(device=device, dtype=dtype)


def _sampling_ratio(ratio: int) -> int:
    return ratio if ratio > 0 else -1


def _ops() -> Any:
    """The module `torchvision.ops`, by a statement that torch.compile can follow."""
    import torchvision.ops

    return torchvision.ops


def _import() -> Any:
    try:
        torchvision = importlib.import_module("torchvision")
    except ImportError as error:
        if error.name == "torchvision":
            raise ImportError("torchvision is not installed in this environment") from error
        raise ImportError(f"the installed torchvision does not import: {error}") from error
    except (RuntimeError, OSError) as error:  # "operator torchvision::nms does not exist"
        raise ImportError(
            f"the installed torchvision does not fit the installed torch {torch.__version__}: {error}"
        ) from error
    if not hasattr(torch.ops.torchvision, "deform_conv2d"):
        raise ImportError(
            f"the installed torchvision {torchvision.__version__} has no compiled operators that fit the"
            f" installed torch {torch.__version__}"
        )
    return torchvision


@functools.lru_cache(maxsize=None)
def _pack(*, modulated: bool) -> Type[nn.Module]:
    """The pack's class, defined late because its base is torchvision's."""
    base: Type[nn.Module] = _ops().DeformConv2d

    class Pack(base):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: Tuple[int, int],
            *,
            stride: Tuple[int, int],
            padding: Tuple[int, int],
            dilation: Tuple[int, int],
            groups: int,
            bias: bool,
            offset_groups: int,
        ) -> None:
            super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
            taps = offset_groups * kernel_size[0] * kernel_size[1]
            self.conv_offset = nn.Conv2d(
                in_channels, (3 if modulated else 2) * taps, kernel_size, stride, padding, dilation
            )
            for parameter in self.conv_offset.parameters():
                nn.init.zeros_(parameter)

        def forward(self, x: Tensor) -> Any:
            out = self.conv_offset(x)
            if not modulated:
                return super().forward(x, out)
            o1, o2, mask = out.chunk(3, dim=1)
            return super().forward(x, torch.cat((o1, o2), dim=1), mask.sigmoid())

    Pack.__name__ = Pack.__qualname__ = "ModulatedPack" if modulated else "Pack"
    return Pack


def __getattr__(name: str) -> Any:
    """`Pack` and `ModulatedPack`, which pickle looks for here."""
    if name in ("Pack", "ModulatedPack"):
        return _pack(modulated=name == "ModulatedPack")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


PROVIDER = Torchvision()
