"""The provider `torchvision_exported`: torchvision's operators, exported to ONNX and run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._exported import Exported


class TorchvisionExported(Exported):
    """The installed torchvision, as torch.onnx.export translates it."""

    name = "torchvision_exported"

    def package_version(self) -> str:
        """Imports torchvision, and returns its version."""
        import torchvision

        version: str = torchvision.__version__
        return version

    def function(self, operator: str) -> Callable[..., Any]:
        """The function of torchvision.ops, which takes a sampling_ratio of 0 for adaptive, as ONNX does."""
        import torchvision

        function: Callable[..., Any] = getattr(torchvision.ops, operator)
        return function


PROVIDER = TorchvisionExported()
