"""Is torch.vmap over a batch of inputs, of weights or of boxes the same as all of them at once?"""

import functools
import math
import warnings

import pytest
import torch
from torch import Tensor

from cases.case import Case
from cases.operator import Cut, Tensors, all_operators
from cases.sweep import is_typical
from conformance.bench import Bench
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of a few small float64 cases of every operator whose work can be cut in pieces."""
    return is_typical(case) and bool(all_operators()[case.operator].cuts(case))


def test_vmap(case: Case, bench: Bench) -> None:
    """Output and gradients of an operator that is mapped over pieces."""
    faults = []
    for what, cut in all_operators()[case.operator].cuts(case).items():
        compute = functools.partial(_mapped, cut=cut)
        faults += bench.compare(
            "vmap", case, compute, Expectation.output_and_gradients, together=f"vmap:{what}"
        )
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def test_gradients_of_each(case: Case, bench: Bench) -> None:
    """The gradients of each piece alone, vmap of vjp, which add up to those of everything."""
    faults = []
    for what, cut in all_operators()[case.operator].cuts(case).items():
        compute = functools.partial(_gradients_of_each, cut=cut)
        faults += bench.compare("vmap", case, compute, Expectation.gradients, together=f"vmap.vjp:{what}")
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


def _mapped(subject: Subject, cut: Cut) -> Gradients:
    warnings.simplefilter("ignore")  # a slow loop instead of a batching rule is slow, not wrong

    def function(tensors: Tensors) -> Tensor:
        pieces, dims = _pieces(tensors, cut)
        output: Tensor = torch.vmap(subject, (dims,), cut.output)(pieces)
        return output.flatten(cut.output, cut.output + 1)

    return subject.forward_and_backward(function)


def _gradients_of_each(subject: Subject, cut: Cut) -> Gradients:
    warnings.simplefilter("ignore")
    values, others = subject.split()
    pieces, dims = _pieces({**values, **others}, cut)
    cotangents, _ = _pieces(
        {"output": subject.cotangent}, Cut({"output": cut.output}, 0), _count(values, others, cut)
    )

    def pull_back(tensors: Tensors, cotangent: Tensor) -> Tensors:
        of = {name: tensors[name] for name in values}
        rest = {name: tensors[name] for name in others}
        found: Tensors = torch.func.vjp(lambda x: subject({**x, **rest}), of)[1](cotangent)[0]
        return found

    found = torch.vmap(pull_back, (dims, cut.output))(pieces, cotangents["output"])
    whole: Gradients = {}
    for name, gradient in found.items():
        dim = cut.tensors.get(name)
        whole[f"grad:{name}"] = (
            gradient.sum(0) if dim is None else gradient.movedim(0, dim).flatten(dim, dim + 1)
        )
    return whole


def _pieces(tensors: Tensors, cut: Cut, count: int = 0) -> tuple[Tensors, dict[str, int | None]]:
    """The tensors with a dimension of pieces before each one that is cut, and where it is."""
    count = count or _count(tensors, {}, cut)
    dims = {name: cut.tensors.get(name) for name in tensors}
    pieces = {
        name: tensor if dim is None else torch.unflatten(tensor, dim, (count, tensor.shape[dim] // count))
        for (name, tensor), dim in zip(tensors.items(), dims.values(), strict=True)
    }
    return pieces, dims


def _count(values: Tensors, others: Tensors, cut: Cut) -> int:
    """The smallest number above 1 of equal pieces."""
    tensors = {**values, **others}
    length = math.gcd(*(tensors[name].shape[dim] for name, dim in cut.tensors.items()))
    return next((number for number in range(2, length + 1) if length % number == 0), 1)
