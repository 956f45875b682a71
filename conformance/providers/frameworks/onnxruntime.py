"""The provider `onnxruntime`: ONNX' DeformConv and RoiAlign in ONNX Runtime's CPU provider; outputs alone."""

from __future__ import annotations

import numpy as np

from ._arrays import Arguments, Arrays
from ._onnx_graph import OPERATORS, one_node


class OnnxRuntime:
    """The installed onnxruntime; models are made by the installed onnx."""

    name = "onnxruntime"
    promises_everything = False
    operators = OPERATORS

    def load(self) -> str:
        """Imports both, and returns onnxruntime's version. Raises ImportError when one is not there."""
        try:
            import onnx  # noqa: F401
            import onnxruntime
        except ImportError as error:
            raise ImportError(f"onnxruntime needs onnx and onnxruntime: {error}") from error
        version: str = onnxruntime.__version__
        return version

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result."""
        model, fed = one_node(operator, arrays, arguments)
        return run(model.SerializeToString(), fed)


def run(model: bytes, fed: dict[str, np.ndarray]) -> np.ndarray:
    """The first output of a model, by one thread, without changes to its graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, fed)[0]
    return result


PROVIDER = OnnxRuntime()
