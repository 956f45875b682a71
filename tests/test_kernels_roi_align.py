"""roi_align: the compiled operator, the composite, and the conventions that both follow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import composite, roi_align

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BOTH = [roi_align, composite.roi_align]

BOXES = [
    [0, 1.0, 1.0, 6.0, 5.0],
    [2, -3.0, -4.0, 20.0, 14.5],  # beyond the image on every side
    [1, 3.0, 3.0, 2.0, 2.0],  # inverted
    [0, 0.2, 0.1, 0.3, 0.3],  # smaller than a pixel
    [2, 30.0, 30.0, 40.0, 40.0],  # outside
    [1, 4.0, 4.0, 4.0, 4.0],  # empty
]


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 4, 9, 8, generator=generator, dtype=torch.float64).to(dtype)
    return image, torch.tensor(BOXES, dtype=dtype)


def differentiate(function: Callable[..., Tensor], image: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    image = image.detach().requires_grad_()
    out = function(image, *arguments)
    grad = torch.arange(1, out.numel() + 1, dtype=torch.float64).sin().reshape(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, image, grad)[0]


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        tolerance = 8 * torch.finfo(other.dtype).eps * max(1.0, other.nan_to_num(0, 0, 0).abs().max().item())
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_operator_equals_the_composite(dtype: torch.dtype, ratio: int, aligned: bool) -> None:
    image, boxes = make(dtype)
    arguments = (image, boxes, (3, 2), 0.7, ratio, aligned)
    assert_same(differentiate(roi_align, *arguments), differentiate(composite.roi_align, *arguments))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_equals_torchvision(dtype: torch.dtype, ratio: int, aligned: bool) -> None:
    torchvision = pytest.importorskip("torchvision")
    image, boxes = make(dtype)
    arguments = (image, boxes, (3, 2), 0.7, ratio, aligned)
    assert_same(differentiate(roi_align, *arguments), differentiate(torchvision.ops.roi_align, *arguments))


@pytest.mark.parametrize("function", BOTH)
def test_a_list_of_boxes_is_one_tensor_per_image(function: Callable[..., Tensor]) -> None:
    image, boxes = make()
    per_image = [boxes[boxes[:, 0] == number, 1:] for number in range(3)]
    ordered = boxes[boxes[:, 0].argsort(stable=True)]
    assert torch.equal(function(image, per_image, 2), function(image, ordered, 2))


@pytest.mark.parametrize("function", BOTH)
def test_no_boxes_and_no_images(function: Callable[..., Tensor]) -> None:
    image, boxes = make()
    out, grad = differentiate(function, image, boxes[:0], (3, 2))
    assert out.shape == (0, 4, 3, 2)
    assert not grad.any()
    assert function(image[:0], [], 2).shape == (0, 4, 2, 2)
    assert function(image[:0], boxes[:0], 2).shape == (0, 4, 2, 2)


@pytest.mark.parametrize("aligned", [False, True])
def test_every_order_of_derivative(aligned: bool) -> None:
    image, boxes = make()
    image = image[:, :1, :4, :3].contiguous().requires_grad_()

    def call(image: Tensor) -> Tensor:
        return roi_align(image, boxes, (2, 1), 0.5, 2, aligned)

    def cubed(image: Tensor) -> Tensor:
        return torch.autograd.grad(call(image).pow(3).sum(), image, create_graph=True)[0]

    assert torch.autograd.gradcheck(call, (image,))
    assert torch.autograd.gradgradcheck(call, (image,))
    assert torch.autograd.gradgradcheck(cubed, (image,))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("position", [-1.25, -1.0, -0.5, 0.0, 0.5, 2.0, 2.5, 3.0, 3.25])
def test_sampling_is_closed_and_clamped(function: Callable[..., Tensor], position: float) -> None:
    image = torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1)
    # One sample in the middle of an aligned box; half a pixel is taken off.
    box = torch.tensor([[0, 0.0, position, 1.0, position + 1.0]])
    expected = {-1.25: 0.0, -1.0: 1.0, -0.5: 1.0, 0.0: 1.0, 0.5: 1.5, 2.0: 4.0, 2.5: 4.0, 3.0: 4.0, 3.25: 0.0}
    assert function(image, box, 1, 1.0, 1, True).item() == expected[position]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1e19, 1e9, 6e4])
def test_special_boxes_neither_hang_nor_read_outside(
    function: Callable[..., Tensor], dtype: torch.dtype, ratio: int, special: float
) -> None:
    image, _ = make(dtype)
    boxes = torch.tensor([1.0, 1.0, 5.0, 5.0], dtype=torch.float64).repeat(5, 1)
    boxes[range(4), range(4)] = special
    boxes[4] = torch.tensor([-special, -special, special, special])
    boxes = torch.cat((torch.zeros(5, 1, dtype=torch.float64), boxes), 1).to(dtype)
    start = time.monotonic()
    got = differentiate(function, image, boxes, 7, 1.0, ratio, True)
    assert time.monotonic() - start < 10
    assert all(value.isfinite().all() for value in got)
    assert_same(got, differentiate(composite.roi_align, image, boxes, 7, 1.0, ratio, True))
    if math.isnan(special) or (math.isinf(special) and ratio < 0):
        assert not got[0].any()


@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_special_pixels_spread_alike(special: float) -> None:
    image, boxes = make()
    image.flatten()[::11] = special
    got, expected = (function(image, boxes, (3, 2), 1.0, -1, True) for function in BOTH)
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_more_images_than_a_dtype_can_number() -> None:
    image = torch.zeros(300, 1, 2, 2, dtype=torch.bfloat16)
    boxes = [torch.zeros(1, 4, dtype=torch.bfloat16)] * 300
    with pytest.raises(ValueError, match=r"more images than torch\.bfloat16 can number"):
        roi_align(image, boxes, 1)


def test_forward_mode() -> None:
    image, boxes = make()
    direction = torch.randn_like(image)

    def call(image: Tensor) -> Tensor:
        return roi_align(image, boxes, 2)

    torch.testing.assert_close(torch.func.jvp(call, (image,), (direction,))[1], call(direction))
