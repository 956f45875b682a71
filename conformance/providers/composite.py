"""The provider `composite`: the same operators written as differentiable torch operations."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, ClassVar

from torch import Tensor

import kernels


class Composite:
    """`kernels.composite`, on any device and to any order; it has the operators but no modules."""

    name = "composite"
    promises_everything = True
    not_promised: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("*/threads", "*/batch", "*/deterministic"), "torch's operations add up in an order of theirs"
        ),
        **dict.fromkeys(
            ("*roi_*/vmap*:rois", "*roi_*/compile*", "*roi_*/export*"),
            "how many samples and pixels it gathers depends on the boxes' values",
        ),
    }

    def load(self) -> str:
        """Nothing to build."""
        return version("gradparity")

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        """`kernels.composite.deform_conv2d`."""
        return kernels.composite.deform_conv2d(input, offset, weight, bias, **arguments)

    def roi_align(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.roi_align`."""
        return kernels.composite.roi_align(input, rois, **arguments)

    def roi_align_max(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.roi_align` in mode "max"."""
        return kernels.composite.roi_align(input, rois, mode="max", **arguments)

    def roi_align_rois_grad(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.roi_align` with gradients for rois."""
        return kernels.composite.roi_align(input, rois, rois_grad=True, **arguments)

    def roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.roi_pool`."""
        return kernels.composite.roi_pool(input, rois, **arguments)

    def ps_roi_align(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.ps_roi_align`."""
        return kernels.composite.ps_roi_align(input, rois, **arguments)

    def ps_roi_pool(self, input: Tensor, rois: Tensor, **arguments: Any) -> Tensor:
        """`kernels.composite.ps_roi_pool`."""
        return kernels.composite.ps_roi_pool(input, rois, **arguments)


PROVIDER = Composite()
