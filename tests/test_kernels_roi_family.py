"""What holds for every operator on boxes: threads, batches, 16 bits, nothing to do, lists, meta tensors, modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels

Function = Callable[..., Tensor]

OPERATORS: dict[str, Function] = {
    "roi_align": lambda image, boxes: kernels.roi_align(image, boxes, (2, 3), 0.5),
    "roi_align of a grid": lambda image, boxes: kernels.roi_align(image, boxes, (2, 3), 0.5, 2, True),
    "roi_align max": lambda image, boxes: kernels.roi_align(image, boxes, (2, 3), 0.5, mode="max"),
    "roi_align rois_grad": lambda image, boxes: kernels.roi_align(
        image, boxes, (2, 3), 0.5, 2, True, rois_grad=True
    ),
    "roi_align max rois_grad": lambda image, boxes: kernels.roi_align(
        image, boxes, (2, 3), 0.5, mode="max", rois_grad=True
    ),
    "roi_pool": lambda image, boxes: kernels.roi_pool(image, boxes, (2, 3), 0.5),
    "ps_roi_align": lambda image, boxes: kernels.ps_roi_align(image, boxes, (2, 3), 0.5),
    "ps_roi_pool": lambda image, boxes: kernels.ps_roi_pool(image, boxes, (2, 3), 0.5),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def draw(dtype: torch.dtype = torch.float32, boxes: int = 5, channels: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(3, channels, 9, 8, generator=generator).to(dtype)
    corners = torch.rand(boxes, 4, generator=generator) * 12 - 2
    corners[:, 2:] += corners[:, :2].abs()
    rois = torch.cat((torch.arange(boxes)[:, None] % 3, corners), dim=1)
    return image, rois.to(dtype)


def differentiate(function: Function, image: Tensor, rois: Tensor) -> list[Tensor]:
    """The output, its gradients by image and rois, and theirs once more."""
    leaves = [image.detach().requires_grad_(), rois.detach().requires_grad_()]
    output = function(*leaves)
    grad = torch.arange(1.0, output.numel() + 1).sin().view(output.shape).to(output).requires_grad_()
    first = torch.autograd.grad(output, leaves, grad, create_graph=True, allow_unused=True)
    gradients = [gradient for gradient in first if gradient is not None]
    cotangents = [torch.arange(1.0, g.numel() + 1).cos().view(g.shape).to(g) for g in gradients]
    second = torch.autograd.grad(gradients, [*leaves, grad], cotangents, allow_unused=True)
    return [output.detach(), *(g.detach() for g in (*gradients, *second) if g is not None)]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_matter(operator: str, dtype: torch.dtype) -> None:
    # More than one thread's share, and no share ends between two boxes.
    image, rois = draw(dtype, boxes=151, channels=30)
    with threads(1):
        expected = differentiate(OPERATORS[operator], image, rois)
    assert all(value.any() for value in expected)
    for number in (2, 3):
        with threads(number):
            found = differentiate(OPERATORS[operator], image, rois)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@every_operator
def test_the_other_images_do_not_matter(operator: str) -> None:
    image, rois = draw()
    chosen = rois[:, 0] == 1
    alone = torch.cat((torch.zeros(int(chosen.sum()), 1), rois[chosen, 1:]), dim=1)
    expected = differentiate(OPERATORS[operator], image[1:2], alone)
    others = torch.full_like(image, math.nan)
    others[1] = image[1]
    found = differentiate(OPERATORS[operator], others, rois[chosen])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1][1:2], expected[1])
    assert not found[1][[0, 2]].any()


@every_operator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_round_once(operator: str, dtype: torch.dtype) -> None:
    image, rois = draw(dtype)

    def wide(image: Tensor, rois: Tensor) -> list[Tensor]:
        leaves = [image.float().requires_grad_(), rois.float().requires_grad_()]
        output = OPERATORS[operator](*leaves)
        grad = torch.arange(1.0, output.numel() + 1).sin().view(output.shape).to(dtype).float()
        gradients = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        return [value.to(dtype) for value in (output.detach(), *gradients) if value is not None]

    expected = wide(image, rois)
    found = differentiate(OPERATORS[operator], image, rois)[: len(expected)]
    assert all(value.dtype == dtype for value in found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@every_operator
def test_the_composite_says_the_same(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, rois = draw(torch.float64)
    expected = differentiate(OPERATORS[operator], image, rois)
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"):
        monkeypatch.setattr(kernels, name, getattr(kernels.composite, name))
    found = differentiate(OPERATORS[operator], image, rois)
    assert min(len(found), len(expected)) >= 3
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"{operator}, result {number}")


@every_operator
def test_no_boxes_and_no_images(operator: str) -> None:
    image, rois = draw()
    channels = 1 if operator.startswith("ps_") else 6
    output, gradient, *_ = differentiate(OPERATORS[operator], image, rois[:0])
    assert output.shape == (0, channels, 2, 3)
    assert gradient.shape == image.shape
    assert not gradient.any()
    assert OPERATORS[operator](image[:0], []).shape == (0, channels, 2, 3)
    assert differentiate(OPERATORS[operator], image[:0], rois[:0])[1].shape == (0, 6, 9, 8)


@every_operator
def test_a_list_of_boxes_is_one_tensor_per_image(operator: str) -> None:
    image, rois = draw(boxes=7)
    rois = rois[rois[:, 0] != 1]
    rois = rois[rois[:, 0].argsort(stable=True)]
    per_image = [rois[rois[:, 0] == number, 1:] for number in range(3)]
    assert not per_image[1].numel()
    assert torch.equal(OPERATORS[operator](image, per_image), OPERATORS[operator](image, rois))


@every_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_meta_tensors_have_the_right_shapes(operator: str, dtype: torch.dtype) -> None:
    image, rois = draw(dtype)
    real = differentiate(OPERATORS[operator], image, rois)
    found = differentiate(OPERATORS[operator], image.to("meta"), rois.to("meta"))
    assert all(value.is_meta for value in found)
    assert [(v.shape, v.dtype, v.stride()) for v in found] == [(v.shape, v.dtype, v.stride()) for v in real]


@every_operator
def test_memory_layouts_do_not_matter(operator: str) -> None:
    image, rois = draw()
    expected = differentiate(OPERATORS[operator], image, rois)
    wide = torch.full((*image.shape[:-1], 16), math.nan)
    wide[..., ::2] = image
    for other in (image.contiguous(memory_format=torch.channels_last), wide[..., ::2]):
        assert not other.is_contiguous()
        found = differentiate(OPERATORS[operator], other, rois.T.contiguous().T)
        assert found[0].is_contiguous()
        assert all(torch.equal(one, value) for one, value in zip(found, expected, strict=True))


@every_operator
def test_equal_pixels_hand_out_the_whole_gradient_once(operator: str) -> None:
    """All pixels equal: every bin in the image hands out its whole gradient, and nothing more."""
    image, rois = torch.ones(1, 6, 9, 8, dtype=torch.float64), torch.tensor([[0, 2.0, 2.0, 12.0, 12.0]])
    output, gradient, *_ = differentiate(OPERATORS[operator], image, rois.double())
    grad = torch.arange(1.0, output.numel() + 1).sin().double()
    torch.testing.assert_close(output, torch.ones_like(output))
    torch.testing.assert_close(gradient.sum(), grad.sum())


MODULES: list[tuple[nn.Module, str, Function]] = [
    (
        kernels.RoIAlign((2, 3), 0.5, 2, True),
        "RoIAlign(output_size=(2, 3), spatial_scale=0.5, sampling_ratio=2, aligned=True, mode='avg', "
        "rois_grad=False)",
        lambda image, boxes: kernels.roi_align(image, boxes, (2, 3), 0.5, 2, True),
    ),
    (
        kernels.RoIAlign(3, 1.0, -1, mode="max", rois_grad=True),
        "RoIAlign(output_size=3, spatial_scale=1.0, sampling_ratio=-1, aligned=False, mode='max', "
        "rois_grad=True)",
        lambda image, boxes: kernels.roi_align(image, boxes, 3, mode="max", rois_grad=True),
    ),
    (
        kernels.RoIPool((2, 3), 0.25),
        "RoIPool(output_size=(2, 3), spatial_scale=0.25)",
        lambda image, boxes: kernels.roi_pool(image, boxes, (2, 3), 0.25),
    ),
    (
        kernels.PSRoIAlign((2, 3), 0.5, 2),
        "PSRoIAlign(output_size=(2, 3), spatial_scale=0.5, sampling_ratio=2)",
        lambda image, boxes: kernels.ps_roi_align(image, boxes, (2, 3), 0.5, 2),
    ),
    (
        kernels.PSRoIPool((2, 3), 0.5),
        "PSRoIPool(output_size=(2, 3), spatial_scale=0.5)",
        lambda image, boxes: kernels.ps_roi_pool(image, boxes, (2, 3), 0.5),
    ),
]


@pytest.mark.parametrize(("module", "text", "function"), MODULES, ids=lambda part: type(part).__name__)
def test_modules(module: nn.Module, text: str, function: Function) -> None:
    assert repr(module) == text
    assert not list(module.state_dict())
    found, expected = (differentiate(call, *draw()) for call in (module, function))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    first: Any = module(*draw())
    assert first.shape[0] == 5
