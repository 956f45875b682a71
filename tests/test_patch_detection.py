"""torchvision's detectors under patch_torchvision: the same losses, gradients and detections, and second order.

How far the results may lie apart is derived, not chosen. Both RoIAligns keep within the bound of
`conformance.tolerance`, so that to first order a number computed from their results differs by at most the sum of twice
these bounds times its slopes, the absolute values of its derivatives by each value that RoIAlign returns, forward and
backward. For a gradient these are derivatives of second order. What the rest of the detector rounds is not
allowed for, which makes the check stricter, and is why the detectors are so small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from cases.operator import Arithmetic
from cases.operators.roi_align import OPERATOR, RoIAlignCase
from conformance.tolerance import Expected, bound
from kernels import composite, patch_torchvision, roi_align, torchvision_patch

pytest.importorskip("torchvision")
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import fastrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, poolers

WIDE = torch.float64
CHANNELS, CLASSES = 8, 3
ROI_LOSSES = ("loss_classifier", "loss_box_reg", "loss_mask")


def pyramid_pooling(bins: int) -> MultiScaleRoIAlign:
    """Boxes from 32 pixels take the coarser level."""
    return MultiScaleRoIAlign(["0", "1"], bins, 2, canonical_scale=32, canonical_level=3)


def build(detector: type[nn.Module] = MaskRCNN, **settings: Any) -> nn.Module:
    """A small detector on a pyramid of two levels, in float64."""
    torch.manual_seed(0)
    body = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(*channels, 3, 2, 1), nn.Tanh()) for channels in ((3, 8), (8, 8), (8, 16)))
    )
    backbone = BackboneWithFPN(body, {"1": "0", "2": "1"}, [8, 16], CHANNELS)
    if detector is MaskRCNN:
        settings |= {
            "mask_roi_pool": pyramid_pooling(6),
            "mask_head": MaskRCNNHeads(CHANNELS, (CHANNELS,), 1),
            "mask_predictor": MaskRCNNPredictor(CHANNELS, CHANNELS, CLASSES),
        }
    model = detector(
        backbone,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(((16,), (32,), (48,)), ((0.5, 1.0, 2.0),) * 3),
        rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=30,
        rpn_post_nms_top_n_test=30,
        box_batch_size_per_image=16,
        box_roi_pool=pyramid_pooling(4),
        box_head=TwoMLPHead(CHANNELS * 16, 16),
        box_predictor=FastRCNNPredictor(16, CLASSES),
        box_score_thresh=0.0,
        **settings,
    )
    return model.to(WIDE)


def batch(seed: int = 1) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images with two objects each, boxes in pixels."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, *size, generator=generator, dtype=WIDE) for size in ((64, 80), (72, 64))]
    targets = []
    for image in images:
        boxes = torch.tensor([[5.0, 8, 40, 50], [20, 10, 63, 60]], dtype=WIDE)
        masks = torch.zeros(2, *image.shape[1:], dtype=torch.uint8)
        masks[0, 10:40, 8:35] = masks[1, 20:50, 25:55] = 1
        targets.append({"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks})
    return images, targets


def losses(model: nn.Module, parameters: dict[str, Tensor] | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Of a training step; the proposals that are sampled at random are always the same."""
    torch.manual_seed(2)
    model.train()
    found: dict[str, Tensor] = functional_call(model, parameters or {}, batch(seed))
    return found


@dataclass
class Pooling:
    """One call of RoIAlign. Autograd knows the errors, which are zero, as those of its two results."""

    features: Tensor
    rois: Tensor
    settings: dict[str, Any]
    output: Tensor
    error: Tensor
    grad_error: Tensor

    def bounds(self, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """How far two right RoIAligns may be apart, by element of the output and of the input's gradient."""
        scale = self.settings["spatial_scale"]
        images, channels, *size = self.features.shape
        case = RoIAlignCase(
            dtype="float64",
            batch=images,
            channels=channels,
            size=tuple(size),
            rois=len(self.rois),
            output_size=tuple(self.settings["output_size"]),
            scale=round(1 / scale),
            sampling_ratio=self.settings["sampling_ratio"],
            aligned=False,
        )
        assert case.spatial_scale == scale
        tensors = {"input": self.features.detach().requires_grad_(), "rois": self.rois}
        roundings = OPERATOR.roundings(case, tensors)
        majorant = OPERATOR.oracle(case, tensors, Arithmetic.MAJORANT, OPERATOR.conventions[0])
        (of_grad,) = torch.autograd.grad(majorant, tensors["input"], grad_output.abs())
        return (
            2 * bound(Expected(self.output, majorant.detach(), roundings["output"]), WIDE),
            2 * bound(Expected(of_grad, of_grad, roundings["grad:input"]), WIDE),
        )


@contextmanager
def observed_pooling() -> Iterator[list[Pooling]]:
    """Keeps every call of RoIAlign that has boxes."""
    original = poolers.roi_align
    calls: list[Pooling] = []

    def pool(features: Tensor, rois: Tensor, **settings: Any) -> Tensor:
        output: Tensor = original(features, rois, **settings)
        if len(rois):
            errors = (torch.zeros_like(value).requires_grad_() for value in (output, features))
            error, grad_error = errors
            output = output + error
            calls.append(Pooling(features, rois, settings, output, error, grad_error))
        return output

    poolers.roi_align = pool
    try:
        yield calls
    finally:
        poolers.roi_align = original


@dataclass(frozen=True)
class Allowed:
    """A number, and how far it may be from that of another right RoIAlign."""

    value: float
    distance: float


def allow(
    numbers: dict[str, Tensor], calls: Sequence[Pooling], bounds: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Allowed]:
    """Propagates the bounds of each call's two results to the numbers."""
    errors = [error for call in calls for error in (call.error, call.grad_error)]
    limits = [limit for both in bounds for limit in both]
    found = {}
    for name, number in numbers.items():
        distance = 0.0
        if number.requires_grad:
            slopes = torch.autograd.grad(number, errors, retain_graph=True, allow_unused=True)
            pairs = zip(slopes, limits, strict=True)
            distance = sum(float((slope.abs() * limit).sum()) for slope, limit in pairs if slope is not None)
        found[name] = Allowed(number.item(), distance)
    return found


def project(tensor: Tensor, seed: int) -> Tensor:
    """The tensor along a random direction: two that differ have different ones."""
    generator = torch.Generator().manual_seed(seed)
    return (tensor * torch.randn(tensor.shape, generator=generator, dtype=WIDE)).sum()


def training_step(model: nn.Module, derive: bool) -> dict[str, Allowed]:
    """The losses, and the gradient of each parameter along a random direction."""
    with observed_pooling() as calls:
        numbers = losses(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    # An error of RoIAlign's gradient adds to those further back what this does.
    total = sum(numbers.values()) + sum((call.grad_error * call.features).sum() for call in calls)
    grads = torch.autograd.grad(total, [*parameters, *(call.output for call in calls)], create_graph=derive)
    numbers |= {name: project(grad, 3) for name, grad in zip(names, grads, strict=False)}
    if not derive:
        return {name: Allowed(number.item(), 0.0) for name, number in numbers.items()}
    of_outputs = grads[len(parameters) :]
    bounds = [call.bounds(grad.detach()) for call, grad in zip(calls, of_outputs, strict=True)]
    return allow(numbers, calls, bounds)


def detect(model: nn.Module, derive: bool) -> tuple[list[list[int]], dict[str, Allowed]]:
    """The labels of each image's detections, and everything else about them along random directions."""
    model.eval()
    with observed_pooling() as calls:
        images = model(batch()[0])
    numbers = {
        f"{name} of image {number}": project(image[name], 4)
        for number, image in enumerate(images)
        for name in image
        if name != "labels"
    }
    labels = [image["labels"].tolist() for image in images]
    if not derive:
        return labels, {name: Allowed(number.item(), 0.0) for name, number in numbers.items()}
    return labels, allow(numbers, calls, [call.bounds(torch.zeros_like(call.output)) for call in calls])


def apart(patched: dict[str, Allowed], plain: dict[str, Allowed]) -> dict[str, Allowed]:
    """The numbers that differ by more than they may."""
    assert patched.keys() == plain.keys()
    return {
        name: number
        for name, number in patched.items()
        if not abs(number.value - plain[name].value) <= number.distance
    }


@pytest.mark.parametrize("pooling", [roi_align, composite.roi_align], ids=["compiled", "composite"])
def test_a_training_step_is_the_same(pooling: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_patch, "roi_align", pooling)
    model = build(MaskRCNN)
    plain = training_step(model, derive=False)
    with patch_torchvision():
        patched = training_step(model, derive=True)
    assert not apart(patched, plain)
    # The bounds are no free pass: they are small against what they are bounds of.
    for name in ("loss_classifier", "loss_mask", "backbone.body.0.0.weight", "roi_heads.box_head.fc6.weight"):
        assert 0 < patched[name].distance < abs(patched[name].value) / 2**20
    # What does not depend on RoIAlign may not differ at all.
    assert patched["loss_objectness"].distance == 0


@pytest.mark.parametrize("detector", [FasterRCNN, MaskRCNN])
def test_detections_are_the_same(detector: type[nn.Module]) -> None:
    model = build(detector)
    labels, plain = detect(model, derive=False)
    assert min(map(len, labels)) > 5
    with patch_torchvision():
        patched_labels, patched = detect(model, derive=True)
    assert patched_labels == labels
    assert not apart(patched, plain)
    assert 0 < patched["scores of image 0"].distance < abs(patched["scores of image 0"].value) / 2**20


@pytest.mark.parametrize("shift", [0.0, 1e-6])
def test_a_shift_of_a_millionth_of_a_pixel_would_be_noticed(
    shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torchvision_patch.roi_align

    def shifted(input: Tensor, rois: Tensor, *settings: Any) -> Tensor:
        return original(input, rois + shift * torch.tensor([0, 1, 1, 1, 1]), *settings)

    model = build(MaskRCNN)
    plain = training_step(model, derive=False)
    monkeypatch.setattr(torchvision_patch, "roi_align", shifted)
    with patch_torchvision():
        patched = training_step(model, derive=True)
    missed = {name for name in ROI_LOSSES if name not in apart(patched, plain)}
    assert missed == (set() if shift else set(ROI_LOSSES))
    assert ("backbone.body.0.0.weight" in apart(patched, plain)) == bool(shift)


def adapted(
    loss: Callable[[dict[str, Tensor]], Tensor], parameters: dict[str, Tensor], second_order: bool
) -> dict[str, Tensor]:
    """The parameters after a step of MAML's inner loop (Finn et al., arXiv:1703.03400)."""
    values = list(parameters.values())
    grads = torch.autograd.grad(loss(parameters), values, create_graph=second_order)
    return {name: value - 0.1 * grad for name, value, grad in zip(parameters, values, grads, strict=True)}


def test_a_mask_rcnn_learns_to_learn() -> None:
    model = build(MaskRCNN)
    parameters = dict(model.named_parameters())

    def outer(second_order: bool) -> tuple[Tensor, ...]:
        fast = adapted(lambda values: sum_of(losses(model, values, seed=1)), parameters, second_order)
        return torch.autograd.grad(sum_of(losses(model, fast, seed=2)), list(parameters.values()))

    with pytest.raises(RuntimeError, match="double backwards on roi_align not supported"):
        outer(second_order=True)
    with patch_torchvision():
        full, first = outer(second_order=True), outer(second_order=False)
    for name, grad, approximate in zip(parameters, full, first, strict=True):
        assert bool(grad.isfinite().all()), name
        assert bool(grad.any()), name
        assert not torch.equal(grad, approximate), name


def sum_of(found: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(found.values())).sum()


@pytest.mark.parametrize("second_order", [True, False])
def test_finite_differences_agree_with_learning_to_learn(second_order: bool) -> None:
    """On the box branch with fixed boxes, since those that a detector proposes move, and have no gradient."""
    model = build(FasterRCNN)
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith(("backbone", "roi_heads"))
    }
    generator = torch.Generator().manual_seed(6)
    directions = {
        name: torch.randn(value.shape, generator=generator, dtype=WIDE) for name, value in parameters.items()
    }
    boxes = [torch.tensor([[3.0, 5, 30, 41], [10, 4, 60, 50.5], [0, 0, 20, 12]], dtype=WIDE)] * 2
    labels = [torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1])]
    moves = [boxes[0][:, :4] / 50] * 2

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.roi_heads = model.backbone, model.roi_heads

        def forward(self, images: Tensor) -> Tensor:
            pooled = self.roi_heads.box_roi_pool(self.backbone(images), boxes, [(64, 64)] * 2)
            logits, regression = self.roi_heads.box_predictor(self.roi_heads.box_head(pooled))
            return torch.stack(fastrcnn_loss(logits, regression, labels, moves)).sum()

    branch = Branch()
    support, query = torch.rand(2, 2, 3, 64, 64, generator=generator, dtype=WIDE)

    def outer(distance: Tensor) -> Tensor:
        moved = {name: value + distance * directions[name] for name, value in parameters.items()}
        fast = adapted(lambda values: functional_call(branch, values, support), moved, second_order)
        return functional_call(branch, fast, query)

    start = torch.zeros((), dtype=WIDE, requires_grad=True)
    with patch_torchvision():
        if second_order:
            assert torch.autograd.gradcheck(outer, start)
        else:  # which shows that the second order matters here
            with pytest.raises(GradcheckError):
                torch.autograd.gradcheck(outer, start)
