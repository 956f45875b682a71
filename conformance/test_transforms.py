"""Do the transforms of torch.func give what they should?

A Jacobian is contracted with grad_output and a Hessian with the cotangents of the gradients, so that the oracle's
gradients of first and second order judge them.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases.case import Case
from cases.operator import Tensors, all_operators
from cases.sweep import is_typical
from conformance.bench import Bench
from conformance.expectation import Expectation, Expectations, Gradients
from conformance.subject import Subject

Function = Callable[[Tensors], Tensor]


def asks(case: Case) -> bool:
    """Of a few small float64 cases of every function."""
    return is_typical(case) and not all_operators()[case.operator].is_module


def grad(subject: Subject, function: Function, values: Tensors) -> Tensors:
    """torch.func.grad of <output, grad_output>."""
    found: Tensors = torch.func.grad(lambda x: (function(x) * subject.cotangent).sum())(values)
    return found


def vjp(subject: Subject, function: Function, values: Tensors) -> Tensors:
    """torch.func.vjp along grad_output."""
    found: Tensors = torch.func.vjp(function, values)[1](subject.cotangent)[0]
    return found


def jacrev(subject: Subject, function: Function, values: Tensors) -> Tensors:
    """torch.func.jacrev, contracted with grad_output."""
    return _contract(subject.cotangent, torch.func.jacrev(function)(values))


def jacfwd(subject: Subject, function: Function, values: Tensors) -> Tensors:
    """torch.func.jacfwd, contracted with grad_output."""
    return _contract(subject.cotangent, torch.func.jacfwd(function)(values))


def hessian(subject: Subject, function: Function, values: Tensors) -> Tensors:
    """torch.func.hessian of <output, grad_output>, contracted with the cotangents of the gradients."""
    second = torch.func.hessian(lambda x: (function(x) * subject.cotangent).sum())(values)
    rows = [_contract(tangent, second[name]) for name, tangent in subject.tangents.items()]
    return {name: torch.stack([row[name] for row in rows]).sum(0) for name in values}


def _contract(cotangent: Tensor, jacobian: Tensors) -> Tensors:
    return {name: torch.tensordot(cotangent, part, cotangent.dim()) for name, part in jacobian.items()}


@pytest.mark.parametrize("transform", [grad, vjp, jacrev, jacfwd], ids=lambda transform: transform.__name__)
def test_first_order(case: Case, bench: Bench, transform: Callable[..., Tensors]) -> None:
    """Transforms that give the gradients."""

    def expect(expectation: Expectation, convention: str) -> Expectations:
        # The contraction of a Jacobian adds up as many terms as the output has elements.
        terms = expectation.grad_output.numel() if transform in (jacrev, jacfwd) else 0
        return _with_roundings(expectation.gradients(convention), terms)

    _compare(case, bench, transform, expect, "grad")


def test_hessian(case: Case, bench: Bench) -> None:
    """The transform that gives the second order."""

    def expect(expectation: Expectation, convention: str) -> Expectations:
        second = expectation.double_backward(convention)
        terms = sum(tensor.numel() for tensor in expectation.grad_gradients.values())
        return _with_roundings({n: e for n, e in second.items() if n != "gradgrad:grad_output"}, terms)

    _compare(case, bench, hessian, expect, "gradgrad")


def test_jvp(case: Case, bench: Bench) -> None:
    """torch.func.jvp along the cotangents of the gradients."""

    def compute(subject: Subject) -> Gradients:
        values, others = subject.split()
        found = torch.func.jvp(lambda x: subject({**x, **others}), (values,), (subject.tangents,))
        return {"jvp": found[1]}

    if faults := bench.compare("transforms", case, compute, Expectation.forward_mode, together="func.jvp"):
        pytest.fail("\n".join(faults), pytrace=False)


def _compare(
    case: Case,
    bench: Bench,
    transform: Callable[..., Tensors],
    expect: Callable[[Expectation, str], Expectations],
    prefix: str,
) -> None:
    def compute(subject: Subject) -> Gradients:
        warnings.simplefilter("ignore")  # a slow loop instead of a batching rule is slow, not wrong
        values, others = subject.split()
        found = transform(subject, lambda x: subject({**x, **others}), values)
        return {f"{prefix}:{name}": tensor for name, tensor in found.items()}

    quantity = f"func.{transform.__name__}"
    if faults := bench.compare("transforms", case, compute, expect, together=quantity):
        pytest.fail("\n".join(faults), pytrace=False)


def _with_roundings(expected: Expectations, terms: int) -> Expectations:
    return {name: replace(each, roundings=each.roundings + terms) for name, each in expected.items()}
