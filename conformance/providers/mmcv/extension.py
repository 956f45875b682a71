"""Builds the operators of `mmcv._ext` that are compared, from mmcv's own sources."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

from conformance.providers.mmcv.narrow import NarrowExtension
from conformance.providers.protocol import UnavailableError
from kernels.build import Torch, build_library

NAME = "mmcv._ext"

_BINDING = Path(__file__).with_name("binding.cpp")
_SOURCES = (
    "common/pytorch_cpp_helper.hpp",
    "common/pytorch_device_registry.hpp",
    "pytorch/deform_conv.cpp",
    "pytorch/modulated_deform_conv.cpp",
    "pytorch/roi_align.cpp",
    "pytorch/roi_pool.cpp",
    "pytorch/cpu/deform_conv.cpp",
    "pytorch/cpu/modulated_deform_conv.cpp",
    "pytorch/cpu/roi_align.cpp",
)


def build(version: str, csrc: Path, against: Torch | None = None) -> Path:
    """The library of mmcv's operators, from the sources in mmcv's folder ops/csrc, for this torch or another one.

    Raises UnavailableError when the sources are not there, and BuildError when they don't compile.
    """
    sources = [csrc / name for name in _SOURCES]
    if not all(source.is_file() for source in sources):
        raise UnavailableError(
            f"the installed mmcv {version} has neither compiled operators nor sources in {csrc}"
        )
    return build_library(
        "mmcv_narrow",
        [_BINDING],
        include_dirs=[csrc, csrc / "common"],
        depends=sources,
        # Releases of the time of torch 1 need headers that don't compile as C++ 20.
        flags=["-w", "-std=c++17"] if against else ["-w"],
        against=against,
    )


def module(version: str, library: Path) -> NarrowExtension:
    """What to register as `mmcv._ext`."""
    extension = NarrowExtension(NAME, str(library), version)
    extension.__spec__ = ModuleSpec(NAME, None, origin=str(library))
    return extension
