"""The oracles of the packs against a composition by hand, and against published numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explicit import Array, DeformConv, convolution, convolution_gradients
from test_oracle_deform_conv2d import rounding_of_a_weight

from cases.operator import all_operators, parse_case
from cases.operators.deform_conv2d_pack import PackCase
from conformance.expectation import Expectation

GEOMETRY = "in_channels=2,out_channels=2,size=3x4,kernel=2x1,stride=1x2,padding=1x0,dilation=2x1"
PUBLISHED = "modulated_deform_conv2d_pack/data=ramp,batch=1,in_channels=1,out_channels=1,size=3x3,kernel=2x2"

# conv_offset.bias.grad of the layer that pytorch/vision#6885 compares: mmcv is open, torchvision closed.
PUBLISHED_GRADIENTS = {
    "open": [-3, -1.5, -3, -1.5, -3, -1.5, -3, -1.5, 4.5, 4.5, 4.5, 4.5],
    "closed": [0, 0, 0, -1.5, -3, 0, -3, -1.5, 4.5, 4.5, 4.5, 4.5],
}


def by_hand(
    case: PackCase, values: dict[str, Array], grad: Array, *, closed: bool, absolute: bool
) -> dict[str, Array]:
    """Output and gradients of conv_offset -> (offset, sigmoid of the mask) -> deform_conv2d.

    With ``absolute`` the samples stay where they are, and all slopes and values count by their magnitude.
    """
    geometry = (case.stride, case.padding, case.dilation)
    deform = DeformConv(
        *geometry, case.groups, case.offset_groups, closed, absolute, excess=rounding_of_a_weight
    )
    offset_weight, image = values["conv_offset.weight"], values["input"]
    predicted = convolution(image, offset_weight, values["conv_offset.bias"], *geometry)
    split = 2 * case.offset_groups * case.taps
    mask = 1 / (1 + np.exp(-predicted[:, split:])) if case.mask else None
    result = deform(image, predicted[:, :split], values["weight"], values.get("bias"), mask, grad)
    through = [result.pop("grad:offset")]
    if mask is not None:
        through.append(result.pop("grad:mask") * mask * (1 + mask if absolute else 1 - mask))
    if absolute:
        offset_weight, image = np.abs(offset_weight), np.abs(image)
    by_image, by_weight, by_bias = convolution_gradients(
        image, offset_weight, np.concatenate(through, 1), *geometry
    )
    result["grad:input"] = result["grad:input"] + by_image
    return {**result, "grad:conv_offset.weight": by_weight, "grad:conv_offset.bias": by_bias}


@pytest.mark.parametrize("convention", ["open", "closed"])
@pytest.mark.parametrize("offsets", ["zero", "mixed"])
@pytest.mark.parametrize("groups", ["", ",groups=2,offset_groups=2"], ids=["one_group", "groups"])
@pytest.mark.parametrize("operator", ["deform_conv2d_pack", "modulated_deform_conv2d_pack"])
def test_a_pack_is_its_composition(operator: str, groups: str, offsets: str, convention: str) -> None:
    default = all_operators()[operator].case_type().offsets
    chosen = "" if offsets == default else f",offsets={offsets}"
    case = parse_case(f"{operator}/dtype=float64,{GEOMETRY}{groups}{chosen}")
    assert isinstance(case, PackCase)
    expectation = Expectation(case)
    values = {name: tensor.numpy() for name, tensor in expectation.inputs.items()}
    grad, closed = expectation.grad_output.numpy(), convention == "closed"
    signed = by_hand(case, values, grad, closed=closed, absolute=False)
    majorant = by_hand(case, values, grad, closed=closed, absolute=True)
    expected = {**expectation.output(convention), **expectation.gradients(convention)}
    assert set(expected) == set(signed)
    for quantity, oracle in expected.items():
        np.testing.assert_allclose(oracle.value.numpy(), signed[quantity], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(oracle.majorant.numpy(), majorant[quantity], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("convention", ["open", "closed"])
def test_published_gradient_of_conv_offset(convention: str) -> None:
    expectation = Expectation(parse_case(PUBLISHED))
    inputs = expectation.inputs
    assert inputs["input"].tolist() == [[[[1, 2, 3]] * 3]]
    assert torch.equal(inputs["weight"], torch.ones(1, 1, 2, 2))
    assert not inputs["conv_offset.weight"].any()
    assert not inputs["conv_offset.bias"].any()
    assert bool((expectation.grad_output == 1).all())
    gradient = expectation.gradients(convention)["grad:conv_offset.bias"].value
    assert gradient.tolist() == PUBLISHED_GRADIENTS[convention]
