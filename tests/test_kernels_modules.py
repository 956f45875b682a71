"""The modules: published gradients, second order through a network, and state dicts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels import DeformConv2d, DeformConv2dPack, ModulatedDeformConv2dPack, RoIAlign, upgrade_state_dict

PUBLISHED = {
    "open": [-3, -1.5, -3, -1.5, -3, -1.5, -3, -1.5, 4.5, 4.5, 4.5, 4.5],
    "closed": [0, 0, 0, -1.5, -3, 0, -3, -1.5, 4.5, 4.5, 4.5, 4.5],
}


@pytest.mark.parametrize("boundary", PUBLISHED)
def test_the_pack_of_vision_6885_has_the_published_gradient(boundary: str) -> None:
    pack = ModulatedDeformConv2dPack(1, 1, 2, padding=1, boundary=boundary)
    nn.init.ones_(pack.weight)
    pack(torch.tensor([1.0, 2.0, 3.0]).expand(1, 1, 3, 3)).sum().backward()
    assert pack.conv_offset.bias is not None
    assert pack.conv_offset.bias.grad is not None
    assert pack.conv_offset.bias.grad.tolist() == PUBLISHED[boundary]


def test_second_order_through_a_network_as_in_vision_1982() -> None:
    torch.manual_seed(0)
    image = torch.randn(1, 3, 8, 8, requires_grad=True)
    offsets = nn.Conv2d(3, 18, 3, padding=1)
    assert offsets.bias is not None
    convolution = DeformConv2d(3, 4, 3, padding=1)
    pool = RoIAlign(2, 1.0, -1)
    out = pool(convolution(image, offsets(image)), [torch.tensor([[1.0, 1.0, 6.0, 7.0]])])
    (gradient,) = torch.autograd.grad(out.sum(), image, create_graph=True)
    penalty = (gradient.norm() - 1).square()
    penalty.backward()
    for parameter in (convolution.weight, offsets.weight, offsets.bias):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()

    # The penalty's derivative along a direction, from the outside.
    direction = torch.randn_like(convolution.weight)
    expected = float((convolution.weight.grad * direction).sum())  # type: ignore[operator]
    values = []
    for sign in (-1, 1):
        moved = convolution.weight.detach() + sign * 1e-3 * direction
        with torch.no_grad():
            saved = convolution.weight.clone()
            convolution.weight.copy_(moved)
        out = pool(convolution(image, offsets(image)), [torch.tensor([[1.0, 1.0, 6.0, 7.0]])])
        (gradient,) = torch.autograd.grad(out.sum(), image)
        values.append(float((gradient.norm() - 1).square()))
        with torch.no_grad():
            convolution.weight.copy_(saved)
    assert (values[1] - values[0]) / 2e-3 == pytest.approx(expected, rel=2e-2)


def parameters(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def test_parameters_and_their_start() -> None:
    torch.manual_seed(0)
    modulated = ModulatedDeformConv2dPack(6, 4, (3, 2), groups=2, deform_groups=3)
    assert parameters(modulated) == {
        "weight": (4, 3, 3, 2), "bias": (4,), "conv_offset.weight": (54, 6, 3, 2), "conv_offset.bias": (54,),
    }  # fmt: skip
    plain = DeformConv2dPack(6, 4, (3, 2), groups=2, deform_groups=3)
    assert parameters(plain) == {
        "weight": (4, 3, 3, 2), "conv_offset.weight": (36, 6, 3, 2), "conv_offset.bias": (36,),
    }  # fmt: skip
    assert "bias" not in parameters(ModulatedDeformConv2dPack(6, 4, 3, bias=False))
    for pack in (modulated, plain):
        assert not pack.conv_offset.weight.any()
        bound = 1 / math.sqrt(6 * 3 * 2)
        assert 0.8 * bound < pack.weight.abs().max() <= bound


def test_conv_offset_moves_as_the_convolution_does() -> None:
    pack = DeformConv2dPack(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    image = torch.randn(2, 3, 7, 6)
    expected = torch.nn.functional.conv2d(image, pack.weight, None, (2, 1), (1, 2), (1, 2))
    torch.testing.assert_close(pack(image), expected)


def test_the_first_two_thirds_are_offsets_and_the_rest_is_the_mask() -> None:
    pack = ModulatedDeformConv2dPack(1, 1, 1, dtype=torch.float64)
    nn.init.ones_(pack.weight)
    with torch.no_grad():
        pack.conv_offset.bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))  # y, x, mask
    image = torch.arange(16.0, dtype=torch.float64).view(1, 1, 4, 4)
    assert pack(image)[0, 0, 0, 0].item() == pytest.approx(6 / (1 + math.exp(-3)))


@pytest.mark.parametrize("kind", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_state_dicts_of_every_age_load(kind: type[nn.Module]) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(kind(2, 4, 3, padding=1))

    source = network()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    new = source.state_dict()
    assert new._metadata["0"]["version"] == 2  # type: ignore[attr-defined]
    old = {name.replace("0.conv_offset.", "0_offset."): value for name, value in new.items()}
    assert "0_offset.weight" in old
    image = torch.randn(1, 2, 5, 5)
    for state in (new, upgrade_state_dict(source, old)):
        target = network()
        target.load_state_dict(state)
        assert torch.equal(target(image), source(image))

    # A loader like mmcv's, which hands the whole dict to every module.
    target = network()
    pack: Any = target[0]
    complaints: tuple[list[str], ...] = ([], [], [])
    for name, child in (("0.", pack), ("0.conv_offset.", pack.conv_offset)):
        child._load_from_state_dict(old, name, {}, False, *complaints)
    assert complaints == ([], [], [])
    assert torch.equal(target(image), source(image))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_under_autocast_a_pack_returns_the_dtype_of_its_input(
    dtype: torch.dtype, autocast: torch.dtype
) -> None:
    pack = ModulatedDeformConv2dPack(2, 4, 3, padding=1)
    image = torch.randn(1, 2, 5, 5).to(dtype)
    with torch.autocast("cpu", dtype=autocast):
        out = pack(image)
    assert out.dtype == dtype
    # A fresh conv_offset predicts zero in any dtype, and the rest is computed in float32.
    assert torch.equal(out, pack(image.float()).to(dtype))


def test_modules_call_their_functions() -> None:
    image: Tensor = torch.randn(1, 2, 6, 6)
    module = DeformConv2d(2, 2, 3, boundary="closed")
    assert module(image, torch.zeros(1, 18, 4, 4), torch.ones(1, 9, 4, 4)).shape == (1, 2, 4, 4)
    assert "boundary='closed'" in repr(module)
    assert "aligned=True" in repr(RoIAlign((2, 3), 0.5, 2, aligned=True))
