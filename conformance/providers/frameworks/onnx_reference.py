"""The provider `onnx_reference`: the evaluator of ONNX whose operators are written in Python; outputs alone."""

from __future__ import annotations

import math

import numpy as np

from ._arrays import Arguments, Arrays
from ._onnx_graph import OPERATORS, one_node

# It computes sample by sample in Python, up to half a millisecond each.
MOST_SAMPLES = 50_000


class OnnxReference:
    """`onnx.reference.ReferenceEvaluator` of the installed onnx."""

    name = "onnx_reference"
    promises_everything = False
    operators = OPERATORS

    def load(self) -> str:
        """Imports onnx, and returns its version. Raises ImportError when it is not there."""
        try:
            import onnx
            import onnx.reference
        except ImportError as error:
            raise ImportError(f"onnx can't be imported: {error}") from error
        version: str = onnx.__version__
        return version

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result. Raises NotImplementedError when it would take minutes."""
        if operator == "deform_conv2d":
            weight, offset = arrays["weight"], arrays["offset"]
            samples = offset.shape[0] * math.prod(offset.shape[2:]) * weight.size
            if samples > MOST_SAMPLES:
                raise NotImplementedError(
                    f"the reference evaluator would take minutes for {samples} samples, {MOST_SAMPLES} are the limit"
                )
        from onnx.reference import ReferenceEvaluator

        model, fed = one_node(operator, arrays, arguments)
        result: np.ndarray = ReferenceEvaluator(model).run(None, fed)[0]
        return result


PROVIDER = OnnxReference()
