"""A stand-in for mmcv's compiled module `mmcv._ext`, built from mmcv's own sources of a few operators."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from conformance.providers.protocol import UnavailableError
from kernels.build import load_library

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
_OPERATORS = (
    "deform_conv_forward",
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "modulated_deform_conv_forward",
    "modulated_deform_conv_backward",
    "roi_align_forward",
    "roi_align_backward",
    "roi_pool_forward",
    "roi_pool_backward",
)


class _NarrowExtension(ModuleType):
    """Has every name that mmcv looks up when it is imported; the ones that were not built refuse the call."""

    mmcv_version: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"mmcv operator {name} is not in this narrow build of mmcv {self.mmcv_version}, which holds"
                " deform_conv, modulated_deform_conv, roi_align and roi_pool for the CPU"
            )

        return refuse


def build(version: str, csrc: Path) -> ModuleType:
    """The module to register as `mmcv._ext`, from the sources in mmcv's folder ops/csrc.

    Raises UnavailableError when the sources are not there, and BuildError when they don't compile.
    """
    sources = [csrc / name for name in _SOURCES]
    if not all(source.is_file() for source in sources):
        raise UnavailableError(
            f"the installed mmcv {version} has neither compiled operators nor sources in {csrc}"
        )
    library = load_library(
        "mmcv_narrow", [_BINDING], include_dirs=[csrc, csrc / "common"], depends=sources, flags=["-w"]
    )
    module = _NarrowExtension(NAME)
    module.__spec__ = ModuleSpec(NAME, None, origin=str(library))
    module.mmcv_version = version
    for name in _OPERATORS:
        setattr(module, name, getattr(torch.ops.gradparity_mmcv, name))
    return module
