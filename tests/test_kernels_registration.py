"""torch's own checks of the registered operators: schema, autograd, fake tensors, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    boxes = torch.tensor([[0, 0.0, 0.0, 3.0, 3.0], [1, 1.0, 1.0, 2.0, 3.5]], dtype=torch.float64)
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
        "roi_align": (image, boxes, (2, 2), 0.5, -1, True),
        "roi_align_backward": (draw(2, 4, 2, 2), boxes, (2, 4, 5, 4), (2, 2), 0.5, -1, True),
    }


def operator(name: str) -> Any:
    library.load()
    return getattr(torch.ops.gradparity, name).default


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
