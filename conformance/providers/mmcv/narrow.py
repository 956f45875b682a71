"""A stand-in for mmcv's compiled module `mmcv._ext`, with a few of its operators.

Environments made for workers get a copy of this file: it runs on Python 3.6, and imports nothing of this project.
"""

from types import ModuleType
from typing import Any

import torch

OPERATORS = (
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


class NarrowExtension(ModuleType):
    """Has every name that mmcv looks up when it is imported; the ones that were not built refuse the call."""

    def __init__(self, name: str, library: str, mmcv_version: str) -> None:
        super().__init__(name)
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        self.mmcv_version = mmcv_version
        for operator in OPERATORS:
            setattr(self, operator, getattr(torch.ops.gradparity_mmcv, operator))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(
                f"mmcv operator {name} is not in this narrow build of mmcv {self.mmcv_version}, which holds"
                " deform_conv, modulated_deform_conv, roi_align and roi_pool for the CPU"
            )

        return refuse
