"""A gradient does not depend on which other gradients are asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernels

NAMES = ("input", "offset", "weight", "bias", "mask")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NAMES, size)]


def gradients(subset: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The gradients of the same layer by a subset of its tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input": (2, 4, 5, 6),
        "offset": (2, 2 * 2 * 6, 4, 6),
        "weight": (4, 2, 2, 3),
        "bias": (4,),
        "mask": (2, 2 * 6, 4, 6),
    }
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(name in subset)
        for name, shape in shapes.items()
    }
    out = kernels.deform_conv2d(**tensors, padding=(0, 1))
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(out, [tensors[name] for name in subset], cotangent)
    return dict(zip(subset, found, strict=True))


@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_subset(subset: tuple[str, ...]) -> None:
    whole = gradients(NAMES)
    for name, gradient in gradients(subset).items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, whole[name], rtol=1e-13, atol=1e-13)
