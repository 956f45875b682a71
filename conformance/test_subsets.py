"""With requires_grad on some of the tensors, are their gradients right, and is there none of the others?"""

import itertools
from collections.abc import Iterator

import pytest
import torch

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_typical
from conformance.bench import Bench, FaultFoundError
from conformance.expectation import Expectation, Expectations, Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of a few small float64 cases of every function."""
    return is_typical(case) and not all_operators()[case.operator].is_module


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them, from none to all names."""
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def test_subsets(case: Case, bench: Bench) -> None:
    """The gradients, for every subset of the differentiable tensors."""
    if faults := bench.compare("subsets", case, compute, expect, together="subsets"):
        pytest.fail("\n".join(faults), pytrace=False)


def expect(expectation: Expectation, convention: str) -> Expectations:
    """The gradients of every subset."""
    gradients = expectation.gradients(convention)
    return {
        _quantity(name, subset): gradients[f"grad:{name}"]
        for subset in subsets(expectation.differentiable)
        for name in subset
    }


def compute(subject: Subject) -> Gradients:
    """The same by the provider. Raises FaultFoundError for a gradient that nobody asked for."""
    found: Gradients = {}
    for subset in subsets(subject.expectation.differentiable):
        leaves = {
            name: leaf.detach().requires_grad_(name in subset) for name, leaf in subject.leaves().items()
        }
        output = subject(leaves)
        if output.requires_grad != bool(subset):
            asked = " and ".join(subset) or "nothing"
            raise FaultFoundError(
                f"output.requires_grad is {output.requires_grad} when {asked} requires a gradient"
            )
        if subset:
            torch.autograd.backward(output, subject.cotangent)
        if unwanted := [
            name for name, leaf in leaves.items() if leaf.grad is not None and name not in subset
        ]:
            raise FaultFoundError(f"grad:{unwanted[0]}: there is one though it was not asked for")
        found |= {_quantity(name, subset): leaves[name].grad for name in subset}
    return found


def _quantity(name: str, subset: tuple[str, ...]) -> str:
    return f"grad:{name} of {'+'.join(subset)}"
