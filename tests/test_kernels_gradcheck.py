"""gradcheck and gradgradcheck in slow mode, both modes and batched, of every public operator in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

# Corners at which no sample comes near a pixel, the border or a grid size, and no corner near a half.
ROIS = torch.tensor([[0, 0.33, 0.21, 2.86, 2.57], [1, 1.17, -0.64, 3.72, 2.05]], dtype=torch.float64)
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "roi_align": lambda image, rois: kernels.roi_align(image, rois, (2, 1), 0.9, 2),
    "roi_align adaptive": lambda image, rois: kernels.roi_align(image, rois, 2, 0.9),
    "roi_align aligned": lambda image, rois: kernels.roi_align(image, rois, (1, 2), 0.9, 2, True),
    "roi_align max": lambda image, rois: kernels.roi_align(image, rois, 2, 0.9, 2, mode="max"),
    "roi_pool": lambda image, rois: kernels.roi_pool(image, rois, (2, 1), 0.9),
    "ps_roi_align": lambda image, rois: kernels.ps_roi_align(image, rois, (1, 2), 0.9, 2),
    "ps_roi_pool": lambda image, rois: kernels.ps_roi_pool(image, rois, (1, 2), 0.9),
}
BY_BOXES: dict[str, dict[str, Any]] = {
    "mean": {"sampling_ratio": 2},
    "mean, aligned": {"sampling_ratio": 2, "aligned": True},
    "mean, adaptive": {"aligned": True},
    "largest": {"sampling_ratio": 2, "mode": "max"},
    "largest, aligned": {"sampling_ratio": 3, "mode": "max", "aligned": True},
}
LAYERS = {"v1": (1, 1, False), "v2": (1, 2, True), "grouped": (2, 1, True), "depthwise v1": (2, 2, False)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def check(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    assert torch.autograd.gradcheck(
        function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_deform_conv2d(layer: str) -> None:
    groups, offset_groups, modulated = LAYERS[layer]
    values = [draw(2, 2, 2, 3), draw(2, 4 * offset_groups, 2, 2, seed=1), draw(2, 2 // groups, 1, 2, seed=2)]
    values += [draw(2, seed=3), draw(2, 2 * offset_groups, 2, 2, seed=4)] if modulated else []

    def function(
        image: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return kernels.deform_conv2d(image, offset, weight, bias, mask=mask)

    check(function, *values)


@pytest.mark.parametrize("operator", OPERATORS)
def test_pooling(operator: str) -> None:
    image = draw(2, 2, 3, 4)
    check(lambda image: OPERATORS[operator](image, ROIS), image)


@pytest.mark.parametrize("mode", BY_BOXES)
def test_roi_align_by_its_boxes(mode: str) -> None:
    image, corners = draw(2, 2, 3, 4), ROIS[:, 1:].clone().requires_grad_()

    def function(image: Tensor, corners: Tensor) -> Tensor:
        rois = torch.cat((ROIS[:, :1], corners), dim=1)
        return kernels.roi_align(image, rois, 2, 0.9, rois_grad=True, **BY_BOXES[mode])

    check(function, image, corners)


@pytest.mark.parametrize("mode", BY_BOXES)
def test_third_order_of_roi_align_is_the_composites(mode: str) -> None:
    def third(module: Any) -> list[Tensor]:
        leaves = [draw(2, 2, 3, 4), ROIS.clone().requires_grad_()]
        results: tuple[Tensor, ...] = (
            module.roi_align(*leaves, 2, 0.9, rois_grad=True, **BY_BOXES[mode]).sin(),
        )
        for seed in range(3):
            cotangents = [draw(*result.shape, seed=seed).detach() for result in results]
            results = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
        return list(results)

    for found, expected in zip(third(kernels), third(kernels.composite), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
