"""torch's own checks of the registered operators: schema, autograd, fake tensors, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from kernels import library


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def arguments() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    image, offset, weight = draw(2, 4, 5, 4), draw(2, 16, 4, 3), draw(4, 2, 2, 2)
    mask, bias, grad = draw(2, 8, 4, 3), draw(4), draw(2, 4, 4, 3)
    window = ((1, 1), (0, 0), (1, 1), False)
    values = (image, offset, weight, mask)
    cotangents = tuple(torch.randn_like(value, requires_grad=True) for value in values)
    rois = torch.tensor([[0, 0.1, 0.2, 3.0, 3.1], [1, 1.3, 1.1, 2.2, 3.5]], dtype=torch.float64)
    moving = rois.clone().requires_grad_()
    winner = torch.zeros(2, 4, 2, 2, dtype=torch.int64)
    size, scale, align = (2, 4, 5, 4), 0.5, ((2, 2), 0.5, 1, True)
    pooled, position_sensitive = draw(2, 4, 2, 2), draw(2, 1, 2, 2)
    return {
        "deform_conv2d": (*values, bias, *window),
        "deform_conv2d_backward": (grad, *values, *window, [True, True, False, True]),
        "deform_conv2d_double_backward": (
            *cotangents,
            grad,
            *values,
            *window,
            [True, True, True, False, True],
        ),
        "roi_align": (image, moving, None, None, None, *align),
        "roi_align of winners": (image, moving, winner, None, None, *align),
        "roi_align along": (image, moving, None, draw(2, 5), None, *align),
        "roi_align along two": (image, moving, None, draw(2, 5), draw(2, 5), *align),
        "roi_align_backward": (pooled, moving, None, None, None, size, *align),
        "roi_align_backward along": (pooled, moving, winner, draw(2, 5), None, size, *align),
        "roi_align_rois_backward": (pooled, image, moving, None, None, *align),
        "roi_align_rois_backward along": (pooled, image, moving, winner, draw(2, 5), *align),
        "roi_align_max": (image, moving, *align),
        "roi_pool": (image, rois, (2, 2), scale),
        "roi_pool_gather": (image, rois, winner),
        "roi_pool_scatter": (pooled, rois, winner, size),
        "ps_roi_align": (image, rois, (2, 2), scale, -1),
        "ps_roi_align_backward": (position_sensitive, rois, size, (2, 2), scale, -1),
        "ps_roi_pool": (image, rois, (2, 2), scale),
        "ps_roi_pool_backward": (position_sensitive, rois, size, (2, 2), scale),
    }


def operator(name: str) -> Any:
    library.load()
    return getattr(torch.ops.gradparity, name.split()[0]).default


@pytest.mark.parametrize("name", arguments())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(operator(name), arguments()[name])


@pytest.mark.parametrize("name", ["deform_conv2d_backward", "deform_conv2d_double_backward"])
def test_gradients_that_are_not_needed_come_back_empty(name: str) -> None:
    *given, needs = arguments()[name]
    complete = operator(name)(*given, [True] * len(needs))
    for number in range(len(needs)):
        for other, value in enumerate(operator(name)(*given, [number == i for i in range(len(needs))])):
            assert value.numel() == 0 if other != number else torch.equal(value, complete[number])


def floats(value: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]


@pytest.mark.parametrize("name", arguments())
def test_both_modes_agree_on_every_tensor(name: str) -> None:
    """Also where the derivative is zero: of pooling by its boxes, or of the third order."""
    given = [value.detach() if isinstance(value, torch.Tensor) else value for value in arguments()[name]]
    for number, value in enumerate(given):
        if not floats(value):
            continue
        leaf = value.clone().requires_grad_()
        results = floats(operator(name)(*given[:number], leaf, *given[number + 1 :]))
        cotangents = [torch.randn_like(result) for result in results]
        (gradient,) = (
            torch.autograd.grad(results, leaf, cotangents, materialize_grads=True)
            if any(result.requires_grad for result in results)
            else (torch.zeros_like(leaf),)
        )
        direction = torch.randn_like(value)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, direction)  # type: ignore[no-untyped-call]
            found = floats(operator(name)(*given[:number], dual, *given[number + 1 :]))
            tangents = [forward_ad.unpack_dual(result).tangent for result in found]  # type: ignore[no-untyped-call]
            pairing = sum(
                (tangent * cotangent).sum()
                for tangent, cotangent in zip(tangents, cotangents, strict=True)
                if tangent is not None
            )
        torch.testing.assert_close(torch.as_tensor(pairing, dtype=value.dtype), (gradient * direction).sum())
