"""torch's own checks of the registered operators: schema, autograd, fake tensors, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import library


def operator(name: str) -> tuple[Any, tuple[Any, ...]]:
    library.load()
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    image, offset, weight = draw(2, 4, 5, 4), draw(2, 16, 4, 3), draw(4, 2, 2, 2)
    mask, bias, grad = draw(2, 8, 4, 3), draw(4), draw(2, 4, 4, 3)
    window = ((1, 1), (0, 0), (1, 1), False)
    boxes = torch.tensor([[0, 0.0, 0.0, 3.0, 3.0], [1, 1.0, 1.0, 2.0, 3.5]], dtype=torch.float64)
    arguments: dict[str, tuple[Any, ...]] = {
        "deform_conv2d": (image, offset, weight, mask, bias, *window),
        "deform_conv2d_backward": (grad, image, offset, weight, mask, *window, [True, True, False, True]),
        "roi_align": (image, boxes, (2, 2), 0.5, -1, True),
        "roi_align_backward": (draw(2, 4, 2, 2), boxes, (2, 4, 5, 4), (2, 2), 0.5, -1, True),
    }
    return getattr(torch.ops.gradparity, name).default, arguments[name]


@pytest.mark.parametrize(
    "name", ["deform_conv2d", "deform_conv2d_backward", "roi_align", "roi_align_backward"]
)
def test_opcheck(name: str) -> None:
    # Double backward goes through the composite, which takes half a minute to trace with symbolic shapes.
    aot = "static" if name == "deform_conv2d_backward" else "dynamic"
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", f"test_aot_dispatch_{aot}")
    torch.library.opcheck(*operator(name), test_utils=checks)


def test_gradients_that_are_not_needed_come_back_empty() -> None:
    backward, arguments = operator("deform_conv2d_backward")
    complete = backward(*arguments[:-1], [True] * 4)
    for number in range(4):
        needs = [number == other for other in range(4)]
        for other, value in enumerate(backward(*arguments[:-1], needs)):
            assert value.numel() == 0 if other != number else torch.equal(value, complete[number])
