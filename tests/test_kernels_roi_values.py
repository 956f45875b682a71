"""The operators on boxes against their definitions, written out as loops over samples: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

Weights = list[tuple[int, float]]  # pixels along one axis, and what each counts

IMAGES, HEIGHT, WIDTH = 2, 6, 5
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Definition:
    """Which samples a bin has, what is made of them, and how the operator is called."""

    name: str
    arguments: dict[str, Any]
    largest: bool
    position_sensitive: bool = False

    def __str__(self) -> str:
        return f"{self.name} {list(self.arguments.values())}"

    def axis(self, low: float, high: float, bins: int, length: int) -> list[list[Weights]]:
        """The samples of each bin along one axis; one outside the image has no pixels."""
        if not (math.isfinite(low) and math.isfinite(high)):
            return [[] for _ in range(bins)]
        if self.name.endswith("pool"):
            return pixels(low, high, bins, length, not self.position_sensitive)
        aligned = self.arguments.get("aligned", self.position_sensitive)
        return positions(low, high, bins, length, self.arguments["sampling_ratio"], aligned)


def pixels(low: float, high: float, bins: int, length: int, last_included: bool) -> list[list[Weights]]:
    start, end = (
        min(max(int(Decimal(corner).to_integral_value(ROUND_HALF_UP)), -(2**30)), 2**30)
        for corner in (low, high)
    )
    size = max(end - start + last_included, 1)
    return [
        [
            [(pixel, 1.0)]
            for pixel in range(
                max(start + bin * size // bins, 0), min(start - (-(bin + 1) * size // bins), length)
            )
        ]
        for bin in range(bins)
    ]


def positions(
    low: float, high: float, bins: int, length: int, ratio: int, aligned: bool
) -> list[list[Weights]]:
    shift = 0.5 if aligned else 0.0
    start, size = low - shift, high - low
    size = size if aligned else max(size, 1.0)
    grid = ratio if ratio > 0 else max(math.ceil(size / bins), 0)

    def weights(y: float) -> Weights:
        if not -1 <= y <= length:
            return []
        y = max(y, 0.0)
        if y >= length - 1:
            return [(length - 1, 1.0)]
        return [(math.floor(y), 1 - y % 1), (math.floor(y) + 1, y % 1)]

    return [
        [
            weights(start + bin * (size / bins) + (number + 0.5) * (size / bins) / grid)
            for number in range(grid)
        ]
        for bin in range(bins)
    ]


def expected(
    definition: Definition, image: Tensor, rois: Tensor, size: tuple[int, int], scale: float, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of <grad, output> by the image."""
    output, gradient = torch.zeros_like(grad), torch.zeros_like(image)
    for k, c, i, j in torch.cartesian_prod(*map(torch.arange, grad.shape)).tolist():
        number, x1, y1, x2, y2 = rois[k].tolist()
        channel = (c * size[0] + i) * size[1] + j if definition.position_sensitive else c
        plane, target = image[int(number), channel], gradient[int(number), channel]
        rows = definition.axis(y1 * scale, y2 * scale, size[0], HEIGHT)[i]
        columns = definition.axis(x1 * scale, x2 * scale, size[1], WIDTH)[j]
        samples = [
            [(y, x, of_y * of_x) for y, of_y in row for x, of_x in column]
            for row in rows
            for column in columns
        ]
        if not samples:
            continue
        values = [sum(weight * plane[y, x].item() for y, x, weight in sample) for sample in samples]
        share = 1 / len(samples)
        if definition.largest:
            unknown = [value for value in values if math.isnan(value)]
            first = next(
                n
                for n, value in enumerate(values)
                if (math.isnan(value) if unknown else value == max(values))
            )
            samples, values, share = [samples[first]], [values[first]], 1.0
        output[k, c, i, j] = sum(values) * share
        for sample in samples:
            for y, x, weight in sample:
                target[y, x] += weight * share * grad[k, c, i, j]
    return output, gradient


DEFINITIONS = [
    Definition("roi_align", {"sampling_ratio": 2, "aligned": False}, False),
    Definition("roi_align", {"sampling_ratio": -1, "aligned": True}, False),
    Definition("roi_align", {"sampling_ratio": 2, "aligned": True, "mode": "max"}, True),
    Definition("roi_align", {"sampling_ratio": -1, "aligned": False, "mode": "max"}, True),
    Definition("roi_pool", {}, True),
    Definition("ps_roi_align", {"sampling_ratio": 3}, False, True),
    Definition("ps_roi_align", {"sampling_ratio": 0}, False, True),
    Definition("ps_roi_pool", {}, False, True),
]

BOXES = {
    "inside": [[1.0, 1.0, 3.0, 4.0], [0.4, 0.6, 2.3, 3.9]],
    "to the last pixel": [
        [0.0, 0.0, 4.0, 5.0],
        [3.0, 4.0, 4.0, 5.0],
        [4.0, 5.0, 4.0, 5.0],
        [2.0, 2.0, 5.0, 6.0],
    ],
    "half-way": [[0.5, 1.5, 2.5, 3.5], [1.5, 0.5, 3.5, 4.5], [-0.5, -1.5, 1.5, 2.5], [-2.5, -0.5, 0.5, 0.5]],
    "beside a half": [[0.49999999999999994, -0.49999999999999994, 2.4999999999999996, 1.5000000000000002]],
    "empty": [[2.0, 2.0, 2.0, 2.0], [1.3, 2.0, 1.3, 4.0]],
    "inverted": [[3.0, 4.0, 1.0, 1.0], [2.0, 0.0, 1.9, 3.0]],
    "beyond": [[-4.0, -3.0, 9.0, 8.0], [-2.0, -9.0, 2.0, 20.0]],
    "outside": [[7.0, 1.0, 9.0, 3.0], [-9.0, -9.0, -3.0, -3.0]],
    "not finite": [[NAN, 1.0, 3.0, 3.0], [1.0, 1.0, INF, 3.0], [1.0, -INF, 3.0, INF], [1.0, 1.0, 3.0, NAN]],
    "huge": [
        [-1e30, 1.0, 1e30, 3.0],
        [1.0, 1.0, 1e30, 1e30],
        [-1e30, -1e30, 2.0, 2.0],
        [1e30, 1e30, -1e30, -1e30],
    ],
}
# No loop goes over the 1e30 samples of an adaptive grid.
DEFINED = [
    (definition, boxes)
    for definition in DEFINITIONS
    for boxes in BOXES
    if boxes != "huge" or definition.arguments.get("sampling_ratio", 1) > 0
]
# With small integers for pixels, equal candidates are common.
PIXELS = {"numbers": 0.0, "some unknown": 0.1, "below mmcv's start of -10": 0.0}


def draw(channels: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (IMAGES, channels, HEIGHT, WIDTH)
    image = torch.randint(-2, 3, shape, generator=generator).double()
    image[torch.rand(shape, generator=generator) < PIXELS[kind]] = NAN
    return image - 20 if kind.startswith("below") else image


@pytest.mark.parametrize("module", [kernels, kernels.composite], ids=["compiled", "composite"])
@pytest.mark.parametrize("kind", PIXELS)
@pytest.mark.parametrize(("definition", "boxes"), DEFINED, ids=str)
def test_the_definition(definition: Definition, boxes: str, kind: str, module: Any) -> None:
    corners = torch.tensor(BOXES[boxes], dtype=torch.float64)
    rois = torch.cat((torch.arange(len(corners))[:, None] % IMAGES, corners), dim=1)
    for size, scale in (((1, 1), 1.0), ((2, 3), 0.5), ((3, 2), 1.0)):
        channels = 2 * size[0] * size[1] if definition.position_sensitive else 2
        image = draw(channels, kind).requires_grad_()
        function: Callable[..., Tensor] = getattr(module, definition.name)
        output = function(image, rois, size, scale, **definition.arguments)
        grad = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).sin().view(output.shape)
        (gradient,) = torch.autograd.grad(output, image, grad)
        values = expected(definition, image.detach(), rois, size, scale, grad)
        if definition.name == "roi_pool":
            assert torch.equal(output.nan_to_num(99), values[0].nan_to_num(99))
        torch.testing.assert_close(output, values[0], rtol=1e-13, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(gradient, values[1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("module", [kernels, kernels.composite], ids=["compiled", "composite"])
@pytest.mark.parametrize(
    ("position", "slope"),
    [
        *((position, 0.0) for position in (-1.5, -1.0, -0.25, 2.0, 2.5, 3.0, 3.5)),
        *((0.0, 1.0), (0.5, 1.0), (1.0, 4.0), (1.5, 4.0)),
    ],
)
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_what_moves_with_a_box(mode: str, position: float, slope: float, module: Any) -> None:
    """One sample, in the middle of an aligned box, so that either end moves it half as far."""
    image = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).view(1, 1, 3, 1)
    rois = torch.tensor(
        [[0.0, 0.0, position - 1, 1.0, position + 2]], dtype=torch.float64, requires_grad=True
    )
    output = module.roi_align(image, rois, 1, 1.0, 1, True, mode=mode, rois_grad=True)
    (gradient,) = torch.autograd.grad(output.sum(), rois)
    assert gradient.tolist() == [[0.0, 0.0, slope / 2, 0.0, slope / 2]]


@pytest.mark.parametrize("module", [kernels, kernels.composite], ids=["compiled", "composite"])
def test_the_size_of_a_widened_box_is_fixed(module: Any) -> None:
    """Not aligned and smaller than a pixel: its end moves nothing, its start everything, by the scale."""
    image = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64).view(1, 1, 3, 1)
    rois = torch.tensor([[0.0, 0.0, 1.5, 4.0, 2.5]], dtype=torch.float64, requires_grad=True)
    output = module.roi_align(image, rois, 1, 0.5, 1, rois_grad=True)
    (gradient,) = torch.autograd.grad(output.sum(), rois)
    assert output.item() == 2 + 4 * 0.25
    assert gradient.tolist() == [[0.0, 0.0, 4 * 0.5, 0.0, 0.0]]


@pytest.mark.parametrize("module", [kernels, kernels.composite], ids=["compiled", "composite"])
def test_boxes_get_no_gradient_unless_asked_for(module: Any) -> None:
    rois = torch.tensor([[0.0, 0.0, 0.0, 3.0, 3.0]], dtype=torch.float64, requires_grad=True)
    image = draw(4, "numbers")
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"):
        assert not getattr(module, name)(image, rois, 2).requires_grad


@pytest.mark.parametrize("beyond", [NAN, INF])
def test_a_clamped_sample_does_not_move_whatever_lies_beyond(beyond: float) -> None:
    """Its rows are above the image, so the box's y has no gradient, not even that of a pixel that counts nothing."""
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 1] = beyond
    box = torch.tensor([[0, 1.2, 0.0, 2.8, 0.6]], requires_grad=True)
    output = kernels.roi_align(image, box, 1, 1.0, 1, True, rois_grad=True)
    (gradient,) = torch.autograd.grad(output.sum(), box)
    assert gradient[0, [0, 2, 4]].tolist() == [0, 0, 0]
