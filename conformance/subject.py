"""One provider put to one case: what it computes, and how it refuses."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from cases.operator import Tensors
from conformance.expectation import Expectation, Gradients, pair_up
from conformance.providers.protocol import Provider


class MissingOperatorError(Exception):
    """The provider does not have the operator."""


class Subject:
    """A provider's operator as a function of the case's tensors, and its derivatives by autograd."""

    def __init__(self, provider: Provider, expectation: Expectation) -> None:
        name = expectation.operator.name
        if not hasattr(provider, name):
            raise MissingOperatorError(f"{provider.name} has no {name}")
        self.expectation = expectation
        self._operator = getattr(provider, name)
        self._arguments: dict[str, Any] = expectation.operator.arguments(expectation.case)

    @functools.cached_property
    def _module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._operator(**self._arguments)
        return module

    def __call__(self, tensors: Tensors) -> Tensor:
        """The operator on these tensors (a subset may require gradients)."""
        if self.expectation.operator.is_module:
            parameters = {name: tensor for name, tensor in tensors.items() if name != "input"}
            output: Tensor = functional_call(self._module, parameters, (tensors["input"],), strict=True)
            return output
        absent = dict.fromkeys(self.expectation.operator.optional)
        result: Tensor = self._operator(**{**absent, **tensors}, **self._arguments)
        return result

    def leaves(self) -> Tensors:
        """The case's tensors on its device, those that have a gradient requiring one."""
        expectation = self.expectation
        return {
            name: tensor.to(expectation.case.device)
            .detach()
            .requires_grad_(name in expectation.differentiable)
            for name, tensor in expectation.inputs.items()
        }

    def output(self) -> Gradients:
        """The output alone."""
        with torch.no_grad():
            return {"output": self(self.leaves())}

    def gradients(self) -> Gradients:
        """The gradient of each differentiable input, None where the provider gives none."""
        return {f"grad:{name}": gradient for name, gradient in self._first_order(False)[0].items()}

    def double_backward(self) -> Gradients:
        """The second-order gradients by every input and by grad_output."""
        gradients, leaves, cotangent = self._first_order(True)
        grad_gradients = {
            name: tensor.to(cotangent.device) for name, tensor in self.expectation.grad_gradients.items()
        }
        if all(gradient is None or not gradient.requires_grad for gradient in gradients.values()):
            raise NotImplementedError("its gradients can't be differentiated")
        # backward() runs the whole graph: a node that refuses says so, where grad() would go around it.
        torch.autograd.backward([pair_up(gradients, grad_gradients)])
        by = {**{name: leaves[name] for name in self.expectation.differentiable}, "grad_output": cotangent}
        return {
            f"gradgrad:{name}": torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in by.items()
        }

    def _first_order(self, create_graph: bool) -> tuple[Gradients, Tensors, Tensor]:
        leaves = self.leaves()
        out = self(leaves)
        cotangent = self.expectation.grad_output.to(out.device).detach().requires_grad_(create_graph)
        names = self.expectation.differentiable
        if not out.requires_grad:
            return dict.fromkeys(names), leaves, cotangent
        gradients = torch.autograd.grad(
            out,
            [leaves[name] for name in names],
            cotangent,
            create_graph=create_graph,
            allow_unused=True,
        )
        return dict(zip(names, gradients, strict=True)), leaves, cotangent
