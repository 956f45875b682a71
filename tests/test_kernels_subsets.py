"""A gradient does not depend on which other gradients are asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernels

NAMES = ("input", "offset", "weight", "bias", "mask")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NAMES, size)]


def draw(subset: tuple[str, ...], batch: int = 2) -> dict[str, torch.Tensor]:
    """The same layer's tensors, of which a subset requires gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input": (batch, 4, 5, 6),
        "offset": (batch, 2 * 2 * 6, 4, 6),
        "weight": (4, 2, 2, 3),
        "bias": (4,),
        "mask": (batch, 2 * 6, 4, 6),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(name in subset)
        for name, shape in shapes.items()
    }


def gradients(subset: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The gradients of the layer by a subset of its tensors."""
    tensors = draw(subset)
    out = kernels.deform_conv2d(**tensors, padding=(0, 1))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(out, [tensors[name] for name in subset], cotangent)
    return dict(zip(subset, found, strict=True))


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_subset(subset: tuple[str, ...]) -> None:
    whole = gradients(NAMES)
    for name, gradient in gradients(subset).items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, whole[name], rtol=1e-13, atol=1e-13)


# What the gradient of one tensor alone costs: the product that makes the columns' gradient, or the weight's own.
COSTS = {
    "input": {
        "gradparity::deform_conv2d_backward": 1,
        "gradparity::multiply": 1,
        "gradparity::multiply_add": 0,
    },
    "offset": {
        "gradparity::deform_conv2d_backward": 1,
        "gradparity::multiply": 1,
        "gradparity::multiply_add": 0,
    },
    "mask": {
        "gradparity::deform_conv2d_backward": 1,
        "gradparity::multiply": 1,
        "gradparity::multiply_add": 0,
    },
    "weight": {
        "gradparity::deform_conv2d_backward": 1,
        "gradparity::multiply": 0,
        "gradparity::multiply_add": 1,
    },
    "bias": {
        "gradparity::deform_conv2d_backward": 0,
        "gradparity::multiply": 0,
        "gradparity::multiply_add": 0,
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_computed_for_the_others(name: str) -> None:
    tensors = draw((name,), batch=1)
    out = kernels.deform_conv2d(**tensors, padding=(0, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad(out, tensors[name], torch.ones_like(out))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert {key: counts.get(key, 0) for key in COSTS[name]} == COSTS[name]
