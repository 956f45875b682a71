"""The provider `composite`: the same operators written as differentiable torch operations."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from torch import Tensor

import kernels


class Composite:
    """`kernels.composite`, on any device and to any order; it has the operators but no modules."""

    name = "composite"
    promises_everything = True

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


PROVIDER = Composite()
