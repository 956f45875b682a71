"""Is a 16-bit input beside float32 tensors, what a network gives under autocast, computed as it should?

The result's dtype is the input's. The values are multiples of 1/2, which every dtype holds exactly, so that the
expectation of the case, all of whose tensors are 16-bit, holds here too.
"""

import pytest
import torch

from cases.case import Case
from cases.dtypes import DTYPES
from cases.operator import all_operators
from conformance.bench import Bench, FaultFoundError
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of the 16-bit cases with such values."""
    function = not all_operators()[case.operator].is_module
    return function and DTYPES[case.dtype].itemsize == 2 and case.data == "integer" and not case.hostile


def test_autocast(case: Case, bench: Bench) -> None:
    """Output and gradients under torch.autocast, and their dtypes."""
    expect = Expectation.output_and_gradients
    if faults := bench.compare("autocast", case, compute, expect, together="autocast"):
        pytest.fail("\n".join(faults), pytrace=False)


def compute(subject: Subject) -> Gradients:
    """Output and gradients, each in the dtype under test after it was in the dtype that it should be."""
    dtype = DTYPES[subject.expectation.case.dtype]
    leaves = {
        name: (tensor if name == "input" else tensor.detach().float()).requires_grad_(tensor.requires_grad)
        for name, tensor in subject.leaves().items()
    }
    with torch.autocast(subject.expectation.case.device, dtype):
        output = subject(leaves)
    if output.dtype != dtype:
        raise FaultFoundError(f"output: dtype is {output.dtype}, expected input's, {dtype}")
    gradients = subject.pull_back(output, leaves)
    for name, leaf in leaves.items():
        gradient = gradients.get(f"grad:{name}")
        if gradient is not None and gradient.dtype != leaf.dtype:
            raise FaultFoundError(f"grad:{name}: dtype is {gradient.dtype}, expected {leaf.dtype}")
    found = {"output": output.detach(), **gradients}
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in found.items()}
