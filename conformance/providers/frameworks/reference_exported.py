"""The provider `reference_exported`: this project's operators, exported to ONNX and run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._exported import Exported


class ReferenceExported(Exported):
    """`kernels` with `kernels.onnx`, which must be importable there."""

    name = "reference_exported"

    def package_version(self) -> str:
        """Imports the kernels, and returns their version."""
        from importlib.metadata import version

        import kernels.onnx

        kernels.onnx.translation_table()
        return version("gradparity")

    def function(self, operator: str) -> Callable[..., Any]:
        """The function of `kernels`."""
        import kernels

        function: Callable[..., Any] = getattr(kernels, operator)
        return function

    def translations(self) -> dict[Any, Any]:
        """The operators' translations."""
        import kernels.onnx

        return kernels.onnx.translation_table()


PROVIDER = ReferenceExported()
