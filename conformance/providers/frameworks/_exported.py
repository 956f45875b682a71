"""A torch operator as the ONNX graph that torch.onnx.export makes of it, run by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ._arrays import Arguments, Arrays, contiguous, require_dtype, require_held_scale
from .onnxruntime import run


class Exported:
    """The operators of a torch package, exported one by one. A subclass says which package."""

    name: str
    promises_everything = False
    operators: tuple[str, ...] = ("deform_conv2d", "roi_align")

    def __init__(self) -> None:
        # An export takes a second, and depends on nothing but shapes, dtypes and arguments.
        self._graphs: dict[str, bytes] = {}

    def package_version(self) -> str:
        """Imports the package, and returns its version. Raises ImportError when it is not there."""
        raise NotImplementedError

    def function(self, operator: str) -> Callable[..., Any]:
        """The package's operator, of the arguments of `Operators`; of boxes, the position counts and not the name."""
        raise NotImplementedError

    def translations(self) -> dict[Any, Any]:
        """What torch.onnx.export does not know by itself."""
        return {}

    def load(self) -> str:
        """Imports all that is needed, and returns the package's version. Raises ImportError."""
        try:
            import onnxruntime
            import onnxscript  # noqa: F401
            import torch.onnx  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"exported graphs need torch, onnx, onnxscript and onnxruntime: {error}"
            ) from error
        return f"{self.package_version()} in onnxruntime {onnxruntime.__version__}"

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result by its graph."""
        require_dtype("ONNX through numpy", arrays, ("float64", "float32", "float16"))
        require_held_scale("ONNX", arrays, arguments.get("spatial_scale", 1))
        order = ("input", "offset", "weight", "rois", "bias", "mask")
        given = {name: contiguous(arrays[name]) for name in order if arrays.get(name) is not None}
        # What is None stays so in the graph.
        absent = {name: None for name, array in arrays.items() if array is None}
        key = repr((operator, arguments, [(name, each.shape, each.dtype) for name, each in given.items()]))
        if key not in self._graphs:
            self._graphs[key] = self._export(operator, given, {**absent, **arguments})
        return run(self._graphs[key], given)

    def _export(self, operator: str, given: dict[str, np.ndarray], arguments: Arguments) -> bytes:
        import torch

        function, names = self.function(operator), list(given)
        positional = 2 if "rois" in given else 3

        class Layer(torch.nn.Module):
            def forward(self, *tensors: torch.Tensor) -> Any:
                further = dict(zip(names[positional:], tensors[positional:]))
                return function(*tensors[:positional], **further, **arguments)

        tensors = tuple(torch.from_numpy(array) for array in given.values())
        silent = logging.getLogger("onnxscript"), logging.getLogger("torch.onnx")
        for logger in silent:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                Layer(),
                tensors,
                input_names=names,
                output_names=["output"],
                opset_version=20,
                custom_translation_table=self.translations(),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        graph: bytes = program.model_proto.SerializeToString()
        return graph
