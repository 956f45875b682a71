"""deform_conv2d in both modes, under torch.func, and beyond second order: against the composite and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import kernels

Tensors = dict[str, Tensor]
VARIANTS = {
    "groups": (2, 2, True),
    "v1": (1, 1, False),
    "offset_groups": (1, 4, True),
    "depthwise": (4, 1, False),
}


def draw(
    groups: int = 2, offset_groups: int = 2, modulated: bool = True, *, batch: int = 2, seed: int = 0
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "input": (batch, 4, 5, 6),
        "offset": (batch, 2 * offset_groups * 6, 4, 6),
        "weight": (4, 4 // groups, 2, 3),
        "bias": (4,),
        "mask": (batch, offset_groups * 6, 4, 6),
    }
    if not modulated:
        del shapes["bias"], shapes["mask"]
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def call(tensors: Tensors, module: ModuleType = kernels) -> Tensor:
    out: Tensor = module.deform_conv2d(**tensors, padding=(0, 1))
    return out


def assert_same(found: Any, expected: Any) -> None:
    assert tree_leaves(expected)
    for value, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck_of_every_mode(variant: str) -> None:
    names, values = zip(*draw(*VARIANTS[variant], batch=1).items(), strict=True)
    leaves = [value.requires_grad_() for value in values]

    def function(*tensors: Tensor) -> Tensor:
        return call(dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(
        function,
        leaves,
        fast_mode=True,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(
        function, leaves, fast_mode=True, check_fwd_over_rev=True, check_batched_grad=True
    )


def orders(module: ModuleType) -> list[tuple[Tensor, ...]]:
    """Gradients of the first to the fourth order along random cotangents."""
    generator = torch.Generator().manual_seed(1)
    leaves = {name: value.requires_grad_() for name, value in draw().items() if name != "bias"}
    results: tuple[Tensor, ...] = (call(leaves, module),)
    found = []
    for _ in range(4):
        cotangents = [
            torch.randn(result.shape, generator=generator, dtype=result.dtype) for result in results
        ]
        results = torch.autograd.grad(results, list(leaves.values()), cotangents, create_graph=True)
        found.append(results)
    return found


def test_higher_orders() -> None:
    assert_same(orders(kernels), orders(kernels.composite))


def loss(module: ModuleType) -> Callable[[Tensor, Tensor], Tensor]:
    """Of the weight, and of factors of offset and mask."""
    tensors = draw(batch=1)

    def function(weight: Tensor, factors: Tensor) -> Tensor:
        moved = {"offset": tensors["offset"] * factors[0], "mask": tensors["mask"] * factors[1]}
        return call({**tensors, "weight": weight, **moved}, module).sin().sum()

    return function


NESTED: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "hessian": lambda f: torch.func.hessian(f, argnums=(0, 1)),
    "jacrev of jacfwd": lambda f: torch.func.jacrev(torch.func.jacfwd(f, argnums=(0, 1)), argnums=(0, 1)),
    "jacfwd of jacfwd": lambda f: torch.func.jacfwd(torch.func.jacfwd(f, argnums=(0, 1)), argnums=(0, 1)),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=(0, 1)), argnums=(0, 1)),
}


@pytest.mark.parametrize("transform", NESTED)
def test_torch_func(transform: str) -> None:
    weight, factors = draw()["weight"], torch.ones(2, dtype=torch.float64)
    found, expected = (
        NESTED[transform](loss(module))(weight, factors) for module in (kernels, kernels.composite)
    )
    assert_same(found, expected)


THIRD = {
    "reverse": lambda f: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f))),
    "forward": lambda f: torch.func.jacfwd(torch.func.jacrev(torch.func.jacrev(f))),
}


@pytest.mark.parametrize("transform", THIRD)
def test_third_order_under_torch_func(transform: str) -> None:
    tensors = draw(batch=1)

    def scaled(module: ModuleType) -> Callable[[Tensor], Tensor]:
        def function(factor: Tensor) -> Tensor:
            moved = {**tensors, "offset": tensors["offset"] * factor, "input": tensors["input"] * factor}
            return call(moved, module).sin().sum()

        return function

    one = torch.ones(1, dtype=torch.float64)
    found, expected = (THIRD[transform](scaled(module))(one) for module in (kernels, kernels.composite))
    assert_same(found, expected)


def dual(tensors: Tensors, seed: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: forward_ad.make_dual(value, torch.randn(value.shape, generator=generator, dtype=value.dtype))  # type: ignore[no-untyped-call]
        for name, value in tensors.items()
    }


def tangents(values: Any) -> list[Tensor]:
    found = [forward_ad.unpack_dual(value).tangent for value in tree_leaves(values)]  # type: ignore[no-untyped-call]
    assert all(tangent is not None for tangent in found)
    return found


def test_forward_mode_over_two_gradients() -> None:
    def second_order(module: ModuleType) -> list[Tensor]:
        with forward_ad.dual_level():
            leaves = dual({name: value.requires_grad_() for name, value in draw().items() if name != "bias"})
            first = torch.autograd.grad(
                call(leaves, module).sin().sum(), list(leaves.values()), create_graph=True
            )
            second = torch.autograd.grad(
                sum(gradient.sin().sum() for gradient in first), list(leaves.values())
            )  # type: ignore[arg-type]
            return tangents(second)

    assert_same(second_order(kernels), second_order(kernels.composite))


def test_a_tangent_of_grad_alone_passes_through_the_backward() -> None:
    leaves = {name: value.requires_grad_() for name, value in draw().items()}
    out = call(leaves)
    with forward_ad.dual_level():
        grad = dual({"grad": torch.ones_like(out)})["grad"]
        found = tangents(torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True))
        direction = tangents(grad)[0]
    assert_same(found, torch.autograd.grad(out, list(leaves.values()), direction))


BATCHED = [("input", "offset", "mask"), ("weight", "bias"), ("weight",), ("offset",), tuple(draw())]


@pytest.mark.parametrize("batched", BATCHED, ids="-".join)
def test_vmap(batched: tuple[str, ...]) -> None:
    examples = [{**draw(), **{name: draw(seed=seed)[name] for name in batched}} for seed in (1, 2, 3)]
    stacked = {
        name: torch.stack([example[name] for example in examples]) if name in batched else value
        for name, value in draw().items()
    }
    in_dims = ({name: 0 if name in batched else None for name in stacked},)

    def first(tensors: Tensors) -> Tensors:
        gradients: Tensors = torch.func.grad(lambda tensors: call(tensors).sin().sum())(tensors)
        return gradients

    def second(tensors: Tensors) -> Tensors:
        def pairing(tensors: Tensors) -> Tensor:
            return torch.stack([gradient.sin().sum() for gradient in first(tensors).values()]).sum()

        gradients: Tensors = torch.func.grad(pairing)(tensors)
        return gradients

    for function in (call, first, second):
        results = [function(example) for example in examples]
        found = torch.vmap(function, in_dims=in_dims)(stacked)
        for number, expected in enumerate(results):
            assert_same([leaf[number] for leaf in tree_leaves(found)], expected)


def test_torch_func_under_compile() -> None:
    tensors = draw(batch=1)

    def jacobian(tensors: Tensors) -> Tensor:
        found: Tensor = torch.func.jacfwd(lambda weight: call({**tensors, "weight": weight}))(
            tensors["weight"]
        )
        return found

    assert_same(torch.compile(jacobian, backend="aot_eager", fullgraph=True)(tensors), jacobian(tensors))


@pytest.mark.parametrize("by", [("input",), ("offset",), ("weight",), ("input", "offset", "weight")], ids=str)
def test_autocast_does_not_reach_second_order(by: tuple[str, ...]) -> None:
    """A gradient penalty within an autocast region is computed in float32, as without."""

    def penalty(autocast: bool) -> tuple[Tensor, ...]:
        tensors = {name: tensor.float().requires_grad_() for name, tensor in draw(batch=1).items()}
        wanted = [tensors[name] for name in by]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            gradients = torch.autograd.grad(call(tensors).pow(2).sum(), wanted, create_graph=True)
            return torch.autograd.grad(
                torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum(), wanted
            )

    for inside, outside in zip(penalty(True), penalty(False), strict=True):
        assert torch.equal(inside, outside)


def test_no_grad_holds_for_every_level() -> None:
    """What is computed under no_grad is a constant for the outer transforms as well."""
    image = torch.rand(1, 2, 4, 4, dtype=torch.float64)
    box = torch.tensor([[0, 0.0, 0.0, 3.0, 3.0]], dtype=torch.float64)

    def function(image: Tensor) -> Tensor:
        with torch.no_grad():
            constant = kernels.roi_align(image, box, 2).pow(2).sum()
        return constant * image.pow(3).sum()

    found = torch.func.grad(lambda image: torch.func.grad(function)(image).sum())(image)
    torch.testing.assert_close(found, 6 * kernels.roi_align(image, box, 2).pow(2).sum() * image)
