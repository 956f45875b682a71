"""One provider put to one case: what it computes, and how it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
        self.provider = provider
        self._operator = getattr(provider, name)
        self._arguments: dict[str, Any] = expectation.operator.arguments(expectation.case)

    def on(self, expectation: Expectation) -> Subject:
        """The same provider, put to another case."""
        return Subject(self.provider, expectation)

    @functools.cached_property
    def _module(self) -> torch.nn.Module:
        return self.new_module()

    def new_module(self) -> torch.nn.Module:
        """The provider's module as it makes it, not yet with the case's parameters."""
        module: torch.nn.Module = self._operator(**self._arguments)
        return module

    def loaded_module(self) -> torch.nn.Module:
        """A new module of the provider with the case's parameters."""
        module = self.new_module()
        parameters = {name: leaf.detach() for name, leaf in self.leaves().items() if name != "input"}
        module.load_state_dict(parameters, strict=True)
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

    @property
    def cotangent(self) -> Tensor:
        """The case's grad_output on its device."""
        return self.expectation.grad_output.to(self.expectation.case.device)

    @property
    def tangents(self) -> Tensors:
        """The cotangents of the gradients, which are the tangents of forward mode, on the case's device."""
        device = self.expectation.case.device
        return {name: tensor.to(device) for name, tensor in self.expectation.grad_gradients.items()}

    def split(self) -> tuple[Tensors, Tensors]:
        """The case's tensors without a graph: those that have a gradient, and the others."""
        tensors = {name: leaf.detach() for name, leaf in self.leaves().items()}
        wanted = self.expectation.differentiable
        return {n: tensors[n] for n in wanted}, {n: t for n, t in tensors.items() if n not in wanted}

    def forward_and_backward(self, function: Callable[[Tensors], Tensor] | None = None) -> Gradients:
        """The output and the gradients of the case's tensors, of the operator or of something made of it."""
        leaves = self.leaves()
        output = (function or self)(leaves)
        return {"output": output.detach(), **self.pull_back(output, leaves)}

    def pull_back(self, output: Tensor, leaves: Tensors) -> Gradients:
        """The gradient of each differentiable leaf under the case's grad_output, None where there is none."""
        names = self.expectation.differentiable
        if not output.requires_grad:
            return {f"grad:{name}": None for name in names}
        gradients = torch.autograd.grad(
            output, [leaves[name] for name in names], self.cotangent, allow_unused=True
        )
        return {f"grad:{name}": gradient for name, gradient in zip(names, gradients, strict=True)}

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
