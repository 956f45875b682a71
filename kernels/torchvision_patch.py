"""Makes the installed torchvision compute with these kernels, and undoes it.

torchvision's functions, modules and models, scripted ones too, reach its kernels through the operators
torch.ops.torchvision.*. The patch registers other kernels for these with torch's dispatcher, so that all of them are
covered, functions that were imported before as well.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from kernels import checks
from kernels.deform_conv2d import deform_conv2d
from kernels.ps_roi_align import ps_roi_align
from kernels.ps_roi_pool import ps_roi_pool
from kernels.roi_align import roi_align
from kernels.roi_pool import pool_and_argmax

# The devices that torchvision has kernels or casts for.
DEVICES = ("CPU", "CUDA", "MPS", "XPU")

_lock = threading.Lock()
_active: list[TorchvisionPatch] = []
_library: torch.library.Library | None = None
_cache_tag = ""


def patch_torchvision(boundary: str = "open") -> TorchvisionPatch:
    """Makes torchvision's operators compute with these kernels, at once and in the whole process.

    Covered are `torchvision.ops`, its modules and models, functions that were imported before, scripted modules,
    and torch.ops.torchvision.*, on all devices of torchvision's. Shapes, values and derivatives of any order
    are then those of the functions in `kernels`, and so are the errors: ValueError and TypeError.

    Not covered: what autograd recorded before keeps its operators, and loses them not at the end of the patch
    either; and on a GPU, torchvision's roi_align avoids its own operator while deterministic algorithms are on.
    What torch.compile has compiled is compiled again, after the patch and after its end. No other thread may
    run these operators while a patch is made or undone.

    Args:
        boundary: deform_conv2d's convention for a sample at exactly -1; "closed" is torchvision's own.

    Returns:
        The patch. ``undo()`` takes it off, and so does the end of ``with patch_torchvision():``. Of several
        patches that are on, the latest decides.

    Raises:
        ValueError: boundary is something else.
        ImportError: torchvision can't be imported.
        RuntimeError: torchvision lacks its compiled operators, or they are not those that are known here.
    """
    checks.boundary(boundary)
    _check_operators(_import_torchvision())
    patch = TorchvisionPatch(boundary)
    with _lock:
        _update([*_active, patch])
    return patch


class TorchvisionPatch:
    """What `patch_torchvision` returns. It stays on until `undo`, even when nobody holds it."""

    def __init__(self, boundary: str) -> None:
        self.boundary = boundary

    def undo(self) -> None:
        """Takes this patch off, in any order with others; what was there before them computes again.

        Does nothing when it is off already.
        """
        with _lock:
            if self in _active:
                _update([patch for patch in _active if patch is not self])

    def __enter__(self) -> TorchvisionPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} boundary={self.boundary!r}, {'on' if self in _active else 'undone'}>"


def _import_torchvision() -> ModuleType:
    try:
        import torchvision
    except (
        Exception
    ) as error:  # without its compiled operators, it raises whatever its first use of them does
        raise ImportError(f"patch_torchvision needs torchvision, which can't be imported: {error}") from error
    module: ModuleType = torchvision
    return module


def _check_operators(torchvision: ModuleType) -> None:
    """Raises RuntimeError unless torchvision's operators are those that the kernels replace."""
    version = f"torchvision {torchvision.__version__}"
    for name, (arguments, _) in _KERNELS.items():
        if not hasattr(torch.ops.torchvision, name):
            raise RuntimeError(
                f"patch_torchvision needs the compiled operator {name}, which {version} lacks here"
            )
        found = str(_operator(name)._schema)
        known = f"torchvision::{name}{arguments}"
        if found != known:
            raise RuntimeError(f"patch_torchvision replaces {known}, but {version} has {found}")


def _operator(name: str) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(torch.ops.torchvision, name).default
    return overload


def _update(patches: list[TorchvisionPatch]) -> None:
    """Makes these patches the ones that are on."""
    global _library
    if patches and _library is None:
        _library = _register()
    elif not patches and _library is not None:
        _library._destroy()  # type: ignore[no-untyped-call]
        _library = None
    _active[:] = patches
    _forget_the_past()


def _register() -> torch.library.Library:
    library = torch.library.Library("torchvision", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch below 2.14 warns of kernels that are replaced, which is the purpose here.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, (_, kernel) in _KERNELS.items():
            # The devices' own keys are for inference mode, which skips autograd; the last one is vmap's.
            keys = [key for device in DEVICES for key in (f"Autograd{device}", device)]
            for key in (*keys, "FuncTorchBatched"):
                library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
    return library


def _forget_the_past() -> None:
    """Makes torch look the kernels up again where it keeps what it found, compiled, in memory or on disk."""
    global _cache_tag
    config = torch.compiler.config
    others = config.cache_key_tag.removesuffix(_cache_tag)
    _cache_tag = f" torchvision with {__name__}, {_active[-1].boundary}" if _active else ""
    config.cache_key_tag = others + _cache_tag
    for name in _KERNELS:
        _operator(name)._dispatch_cache.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _deform_conv2d(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Tensor:
    if input.dim() == weight.dim() == offset.dim() == 4:
        channels = groups * weight.shape[1]
        if channels != input.shape[1]:
            raise ValueError(
                f"groups must be the {input.shape[1]} channels of input over weight's {weight.shape[1]}, "
                f"got {groups}"
            )
        expected = 2 * offset_groups * weight.shape[2] * weight.shape[3]
        if expected != offset.shape[1]:
            raise ValueError(
                f"offset must have 2*offset_groups*kh*kw = {expected} channels, got {offset.shape[1]}"
            )
    return deform_conv2d(
        input,
        offset,
        weight,
        bias,
        (stride_h, stride_w),
        (pad_h, pad_w),
        (dilation_h, dilation_w),
        mask if use_mask else None,
        boundary=_active[-1].boundary,
    )


def _roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    size = pooled_height, pooled_width
    return roi_align(input, rois, size, float(spatial_scale), sampling_ratio, aligned)


def _roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    size = pooled_height, pooled_width
    output, argmax = pool_and_argmax(input, rois, size, float(spatial_scale))
    return output, argmax.int()


def _ps_roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
) -> tuple[Tensor, Tensor]:
    size = pooled_height, pooled_width
    output = ps_roi_align(input, rois, size, float(spatial_scale), sampling_ratio)
    return output, _channels_read(output)


def _ps_roi_pool(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    output = ps_roi_pool(input, rois, (pooled_height, pooled_width), float(spatial_scale))
    return output, _channels_read(output)


def _channels_read(output: Tensor) -> Tensor:
    """The input channel of each bin, int32 of output's shape, which torchvision returns as well."""
    boxes, *size = output.shape
    channels = torch.arange(math.prod(size), dtype=torch.int32, device=output.device)
    return channels.view(1, *size).repeat(boxes, 1, 1, 1)


# By name: what follows it in the schema, the same in torchvision 0.24 to 0.29, and the kernel.
_KERNELS: dict[str, tuple[str, Any]] = {
    "deform_conv2d": (
        "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
        "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
        "bool use_mask) -> Tensor",
        _deform_conv2d,
    ),
    "roi_align": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
        _roi_align,
    ),
    "roi_pool": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> "
        "(Tensor, Tensor)",
        _roi_pool,
    ),
    "ps_roi_align": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio) -> (Tensor, Tensor)",
        _ps_roi_align,
    ),
    "ps_roi_pool": (
        "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> "
        "(Tensor, Tensor)",
        _ps_roi_pool,
    ),
}
