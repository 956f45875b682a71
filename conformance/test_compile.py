"""Does torch.compile give what eager execution gives, in one graph, with fixed and with changing shapes?

The backend is aot_eager: what Dynamo and AOTAutograd make of an operator, run by the same kernels, so that the results
are the same bit for bit. `test_compile_inductor` asks about generated code.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from cases.case import Case
from cases.operator import Tensors, all_operators
from cases.sweep import is_one_of_few
from conformance.bench import Bench, FaultFoundError, expectation_of
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of one or two small cases of every function."""
    return is_one_of_few(case) and not all_operators()[case.operator].is_module


def test_static(case: Case, bench: Bench) -> None:
    """Output and gradients with shapes that are constants of the graph."""

    def compute(subject: Subject) -> Gradients:
        with compiled(subject, "aot_eager") as (function, _):
            found = subject.forward_and_backward(function)
        refuse_difference(found, subject.forward_and_backward())
        return found

    _compare(case, bench, compute, "compile")


def test_dynamic(case: Case, bench: Bench) -> None:
    """One graph for two numbers and sizes of images."""

    def compute(subject: Subject) -> Gradients:
        operator = subject.expectation.operator
        other = subject.on(expectation_of(operator.larger(case)))
        sizes = {name: tensor.shape for name, tensor in other.leaves().items()}

        with compiled(subject, "aot_eager") as (function, counter):

            def with_open_sizes(tensors: Tensors) -> Tensor:
                for name, tensor in tensors.items():
                    for dim, (here, there) in enumerate(zip(tensor.shape, sizes[name], strict=True)):
                        if here != there:
                            torch._dynamo.mark_dynamic(tensor, dim)
                output: Tensor = function(tensors)
                return output

            found = subject.forward_and_backward(with_open_sizes)
            larger = other.forward_and_backward(function)
            if counter.frame_count != 1:
                raise FaultFoundError("it is compiled anew for images of another number and size")
        refuse_difference(found, subject.forward_and_backward())
        refuse_difference(larger, other.forward_and_backward())
        return found

    _compare(case, bench, compute, "compile:dynamic")


def _compare(case: Case, bench: Bench, compute: Any, quantity: str) -> None:
    expect = Expectation.output_and_gradients
    if faults := bench.compare("compile", case, compute, expect, together=quantity):
        pytest.fail("\n".join(faults), pytrace=False)


@contextmanager
def compiled(subject: Subject, backend: str) -> Iterator[tuple[Any, CompileCounterWithBackend]]:
    """The operator in one graph, and a count of the graphs made; afterwards all graphs are forgotten."""
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield torch.compile(subject, fullgraph=True, backend=counter), counter
    finally:
        torch._dynamo.reset()


def refuse_difference(found: Gradients, eager: Gradients) -> None:
    """Raises FaultFoundError unless all are equal bit for bit."""
    for name, value in eager.items():
        other = found[name]
        if value is None or other is None:
            same = value is other
        else:
            same = value.dtype == other.dtype and torch.equal(value, other)
        if not same:
            raise FaultFoundError(f"{name} differs from eager execution")
