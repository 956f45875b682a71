"""What a case should give: inputs, cotangents, and the oracle's output, gradients and second order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cases.case import Case
from cases.data import draw
from cases.dtypes import DTYPES, accumulation_dtype, unit_roundoff
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.operator import Arithmetic, Operator, Tensors, all_operators
from conformance.tolerance import Expected

Gradients = dict[str, Tensor | None]
Expectations = dict[str, Expected]

# Three products of a bilinear value, a mask and a cotangent, and their two additions.
TERM_ROUNDINGS = 3 * (BILINEAR_ROUNDINGS + 2) + 2


class Expectation:
    """A case with its tensors; the oracle runs when a question first asks, once per convention."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.operator: Operator[Any] = all_operators()[case.operator]
        self.dtype = DTYPES[case.dtype]
        self.inputs: Tensors = self.operator.sample(case)
        self.differentiable = self.operator.differentiable(case)
        self._computed: dict[tuple[str, str], Expectations] = {}
        self._wide = {name: tensor.double().clone() for name, tensor in self.inputs.items()}

    @functools.cached_property
    def roundings(self) -> dict[str, int]:
        """Roundings on the longest path, by quantity of value and first order."""
        return self.operator.roundings(self.case, self.inputs)

    @functools.cached_property
    def grad_output(self) -> Tensor:
        """The cotangent of the output, in the dtype under test."""
        value = self.output(self.operator.conventions[0])["output"].value
        return self.operator.cotangent(self.case, value)

    @functools.cached_property
    def grad_gradients(self) -> Tensors:
        """The cotangents of the gradients, in the dtype under test."""
        return {
            name: draw(self.case, self.case.generator(f"grad_grad:{name}"), tuple(self.inputs[name].shape))
            for name in self.differentiable
        }

    def restore(self) -> list[str]:
        """Undoes what an implementation did to its inputs in place, and returns their names."""
        changed = [
            name
            for name, tensor in self.inputs.items()
            if not torch.equal(tensor.double().nan_to_num(nan=1e300), self._wide[name].nan_to_num(nan=1e300))
        ]
        for name in changed:
            self.inputs[name].copy_(self._wide[name])
        return changed

    def output(self, convention: str) -> Expectations:
        """The output under a convention."""
        return self._once("output", convention, self._output)

    def gradients(self, convention: str) -> Expectations:
        """The gradient of every differentiable input under grad_output."""
        return self._once("gradients", convention, self._gradients)

    def output_and_gradients(self, convention: str) -> Expectations:
        """Both."""
        return {**self.output(convention), **self.gradients(convention)}

    def forward_mode(self, convention: str) -> Expectations:
        """The tangent of the output along grad_gradients, which double backward gives by grad_output."""
        return {"jvp": self.double_backward(convention)["gradgrad:grad_output"]}

    def double_backward(self, convention: str) -> Expectations:
        """The gradients of <gradients, grad_gradients> by every input and by grad_output."""
        return self._once("double_backward", convention, self._double_backward)

    def _once(self, what: str, convention: str, compute: Callable[[str], Expectations]) -> Expectations:
        key = (what, convention)
        if key not in self._computed:
            self._computed[key] = compute(convention)
        return self._computed[key]

    def _output(self, convention: str) -> Expectations:
        value, majorant = (self._forward(arithmetic, convention)[0] for arithmetic in Arithmetic)
        return {"output": self._expected("output", value, majorant)}

    def _gradients(self, convention: str) -> Expectations:
        value, majorant = (self._first_order(arithmetic, convention)[0] for arithmetic in Arithmetic)
        return {
            f"grad:{name}": self._expected(f"grad:{name}", value[name], majorant[name])
            for name in self.differentiable
        }

    def _double_backward(self, convention: str) -> Expectations:
        value, majorant = (self._second_order(arithmetic, convention) for arithmetic in Arithmetic)
        return {
            f"gradgrad:{name}": self._expected(f"gradgrad:{name}", value[name], majorant[name])
            for name in value
        }

    def _forward(self, arithmetic: Arithmetic, convention: str) -> tuple[Tensor, Tensors]:
        leaves = {
            name: tensor.detach().requires_grad_(name in self.differentiable)
            for name, tensor in self._wide.items()
        }
        return self.operator.oracle(self.case, leaves, arithmetic, convention), leaves

    def _first_order(self, arithmetic: Arithmetic, convention: str) -> tuple[Tensors, Tensors, Tensor]:
        out, leaves = self._forward(arithmetic, convention)
        cotangent = self.grad_output.double().requires_grad_()
        gradients = torch.autograd.grad(
            out,
            [leaves[name] for name in self.differentiable],
            arithmetic.of(cotangent),
            create_graph=True,
        )
        return dict(zip(self.differentiable, gradients, strict=True)), leaves, cotangent

    def _second_order(self, arithmetic: Arithmetic, convention: str) -> Tensors:
        gradients, leaves, cotangent = self._first_order(arithmetic, convention)
        pairing = pair_up(gradients, {n: arithmetic.of(g.double()) for n, g in self.grad_gradients.items()})
        names = (*self.differentiable, "grad_output")
        by = [*(leaves[name] for name in self.differentiable), cotangent]
        second = torch.autograd.grad(pairing, by, materialize_grads=True, allow_unused=True)
        return dict(zip(names, second, strict=True))

    def _expected(self, quantity: str, value: Tensor, majorant: Tensor) -> Expected:
        if quantity.startswith("gradgrad:"):
            first_order = "output" if quantity == "gradgrad:grad_output" else quantity[len("grad") :]
            # Its sums run over a product with a cotangent beside the first-order term, so both count, and a term
            # is the sum of three such products.
            roundings = 2 * self.roundings[first_order] + TERM_ROUNDINGS
        else:
            roundings = self.roundings[quantity]
        value, majorant = value.detach(), majorant.detach()
        return Expected(value, majorant, roundings, exact=self._is_exact(majorant))

    def _is_exact(self, majorant: Tensor) -> bool:
        quantum = self.operator.quantum(self.case)
        if quantum == 0 or majorant.numel() == 0:
            return False
        # No sum of multiples of the quantum needs more bits than the accumulation dtype has.
        return float(majorant.max()) * unit_roundoff(accumulation_dtype(self.dtype)) < quantum


def pair_up(gradients: Gradients | Tensors, cotangents: Tensors) -> Tensor:
    """The sum over all inputs of <gradient, cotangent>; inputs without a gradient add nothing."""
    products = [
        (gradient * cotangents[name]).sum() for name, gradient in gradients.items() if gradient is not None
    ]
    return torch.stack(products).sum()
