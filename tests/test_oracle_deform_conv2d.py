"""The oracle of deform_conv2d against explicit sums: two derivations, one answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from explicit import Array, DeformConv
from torch import Tensor

from cases.coordinates import BOUNDARIES, classify
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.operators.deform_conv2d import (
    OPERATOR,
    DeformConv2dCase,
    base_coordinates,
    positions,
)
from conformance.expectation import Expectation

GEOMETRIES = {
    "plain": {"in_channels": 2, "out_channels": 1, "size": (3, 4), "kernel": (2, 1)},
    "groups": {"in_channels": 4, "out_channels": 4, "size": (3, 3), "kernel": (1, 2), "groups": 2},
    "offset_groups": {
        "in_channels": 4,
        "out_channels": 2,
        "size": (3, 3),
        "kernel": (1, 2),
        "offset_groups": 2,
    },
    "crossed_groups": {
        "in_channels": 6,
        "out_channels": 2,
        "size": (2, 4),
        "kernel": (2, 1),
        "groups": 2,
        "offset_groups": 3,
    },
    "non_square": {"size": (6, 4), "kernel": (2, 3), "stride": (3, 2), "padding": (2, 1), "dilation": (3, 1)},
}
SMALL = DeformConv2dCase(
    dtype="float64", batch=2, in_channels=2, out_channels=2, size=(3, 4), kernel=(1, 2), padding=(0, 1)
)


def rounding_of_a_weight(coordinate: float) -> float:
    """The term that the majorant has beside the absolute sum (`cases.operators.deform_conv2d.tents`)."""
    return 0.0 if coordinate == int(coordinate) else (1 + abs(coordinate)) / BILINEAR_ROUNDINGS


def explicit_of(case: DeformConv2dCase, **options: object) -> DeformConv:
    return DeformConv(case.stride, case.padding, case.dilation, case.groups, case.offset_groups, **options)  # type: ignore[arg-type]


def arrays(expectation: Expectation) -> dict[str, Array]:
    tensors = {**expectation.inputs, "grad": expectation.grad_output}
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def compute(explicit: DeformConv, values: dict[str, Array]) -> dict[str, Array]:
    return explicit(
        values["input"],
        values["offset"],
        values["weight"],
        values.get("bias"),
        values.get("mask"),
        values["grad"],
    )


def assert_close(got: Tensor, expected: Array, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=rtol, atol=1e-13)


def assert_oracle_is_explicit(case: DeformConv2dCase, kind: type[np.floating] = np.float64) -> None:
    """Value equal to the explicit sum, majorant equal to the absolute sum and its documented excess."""
    expectation = Expectation(case)
    values = arrays(expectation)
    for convention in OPERATOR.conventions:
        options = {"closed": convention == "closed", "kind": kind}
        signed = compute(explicit_of(case, **options), values)
        absolute = compute(explicit_of(case, **options, absolute=True), values)
        raised = compute(explicit_of(case, **options, absolute=True, excess=rounding_of_a_weight), values)
        expected = {**expectation.output(convention), **expectation.gradients(convention)}
        assert set(expected) == set(signed)
        for quantity, oracle in expected.items():
            assert_close(oracle.value, signed[quantity])
            assert_close(oracle.majorant, raised[quantity])
            assert np.all(oracle.majorant.numpy() >= absolute[quantity] * (1 - 1e-12))
            # The excess of one axis is at most (1 + |y|)/7, and only on pixels that the sample touches.
            largest = 1 + (1 + max(case.size)) / BILINEAR_ROUNDINGS
            touched = compute(
                explicit_of(case, **options, absolute=True, excess=lambda y: y != int(y)), values
            )
            assert np.all(oracle.majorant.numpy() <= largest**2 * touched[quantity] * (1 + 1e-12))


@pytest.mark.parametrize("mask", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometry(geometry: str, mask: bool) -> None:
    case = DeformConv2dCase(
        dtype="float64", batch=2, offsets="mixed", mask=mask, bias=mask, **GEOMETRIES[geometry]
    )  # type: ignore[arg-type]
    assert_oracle_is_explicit(case)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_boundary_class(boundary: str) -> None:
    case = dataclasses.replace(SMALL, offsets=boundary)
    if boundary == "non_finite":
        # A NaN is no coordinate of the definition's: it comes to nothing, as if it were far outside.
        expectation = Expectation(case)
        values = arrays(expectation)
        values["offset"] = np.where(np.isfinite(values["offset"]), values["offset"], 1e6)
        explicit = compute(explicit_of(case), values)
        for quantity, oracle in {**expectation.output("open"), **expectation.gradients("open")}.items():
            assert_close(oracle.value, explicit[quantity])
    else:
        assert_oracle_is_explicit(case)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", np.float32), ("float16", np.float16)])
def test_coordinates_are_rounded_as_the_dtype_under_test_rounds_them(
    dtype: str, kind: type[np.floating]
) -> None:
    case = dataclasses.replace(SMALL, dtype=dtype, size=(9, 12), stride=(3, 4), offsets="mixed")
    expectation = Expectation(case)
    y, _ = positions(case, expectation.inputs["offset"].double())
    exact = base_coordinates(case)[0] + expectation.inputs["offset"].double().numpy()[:, ::2].reshape(y.shape)
    assert np.any(y.numpy() != exact)
    assert_oracle_is_explicit(case, kind)


def test_the_conventions_differ_at_the_low_edge_only() -> None:
    case = dataclasses.replace(SMALL, offsets="mixed", batch=8)
    expectation = Expectation(case)
    y, x = (axis.detach().numpy() for axis in positions(case, expectation.inputs["offset"].double()))
    at_edge = (classify(y, 3) == "edge_low") | (classify(x, 4) == "edge_low")
    both = [expectation.gradients(convention)["grad:offset"].value for convention in ("open", "closed")]
    differs = (both[0] != both[1]).reshape(8, 2, 2, *SMALL.output_size).any(2).numpy()
    assert differs.any()
    assert not (differs & ~at_edge[:, 0]).any()
    for name in ("input", "weight", "bias", "mask"):
        opened, closed = (
            expectation.gradients(convention)[f"grad:{name}"].value for convention in ("open", "closed")
        )
        assert torch.equal(opened, closed)


def pairing(case: DeformConv2dCase, values: dict[str, Array], cotangents: dict[str, Array]) -> float:
    """<first-order gradients, cotangents>, by the explicit formulas."""
    gradients = compute(explicit_of(case), values)
    return sum(float((gradients[f"grad:{name}"] * of).sum()) for name, of in cotangents.items())


@pytest.mark.parametrize("boundary", ["interior", "rim"])
@pytest.mark.parametrize("groups", [{}, {"groups": 2, "offset_groups": 2}], ids=["one_group", "groups"])
def test_second_order_is_the_difference_of_explicit_first_order(
    boundary: str, groups: dict[str, int]
) -> None:
    # The pairing is affine in every single element, so a central difference is exact within a cell.
    case = dataclasses.replace(SMALL, batch=1, size=(3, 3), padding=(0, 0), offsets=boundary, **groups)  # type: ignore[arg-type]
    expectation = Expectation(case)
    values = arrays(expectation)
    cotangents = {name: tensor.numpy() for name, tensor in expectation.grad_gradients.items()}
    second_order = expectation.double_backward("open")
    assert set(second_order) == {
        f"gradgrad:{n}" for n in ("input", "offset", "weight", "bias", "mask", "grad_output")
    }
    step = 2.0**-7
    for quantity, oracle in second_order.items():
        name = quantity.removeprefix("gradgrad:").replace("grad_output", "grad")
        difference = np.zeros(values[name].shape)
        for index in np.ndindex(difference.shape):
            sides = []
            for sign in (1, -1):
                moved = values[name].copy()
                moved[index] += sign * step
                sides.append(pairing(case, {**values, name: moved}, cotangents))
            difference[index] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(oracle.value.numpy(), difference, rtol=1e-9, atol=1e-11)
        assert np.all(oracle.majorant.numpy() >= np.abs(difference) * (1 - 1e-9))
        assert name == "bias" or np.any(difference != 0)


def test_second_order_majorant_bounds_every_sign_pattern() -> None:
    # A sum of absolute values does not depend on any sign, and no choice of signs exceeds it.
    case = dataclasses.replace(SMALL, batch=1, size=(3, 3), padding=(0, 0))
    expectation = Expectation(case)
    majorant = {name: each.majorant for name, each in expectation.double_backward("open").items()}
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        flipped = Expectation(case)
        for tensors in (flipped.inputs, flipped.grad_gradients):
            for name, tensor in tensors.items():
                if name != "offset" or tensors is flipped.grad_gradients:
                    tensor *= torch.randint(0, 2, tensor.shape, generator=random) * 2 - 1
        flipped._wide = {name: tensor.double() for name, tensor in flipped.inputs.items()}
        for name, each in flipped.double_backward("open").items():
            assert torch.allclose(each.majorant, majorant[name], rtol=1e-12)
            assert bool((each.value.abs() <= majorant[name] * (1 + 1e-12)).all())


def test_roundings_counted_by_hand() -> None:
    # A fresh 3x3 layer with padding 1: nine samples hit an inner pixel; 4 channels, 4 outputs, 2*30 pixels.
    expectation = Expectation(DeformConv2dCase(offsets="zero"))
    bilinear = 7  # two weights, their product, the pixel, three additions
    assert expectation.roundings == {
        "output": bilinear + 4 * 9 + 2,  # times mask and weight and the sum of 36, then the bias
        "grad:input": 4 + 5 + 9,  # sum over outputs; mask, two weights, product, pixel; sum of nine
        "grad:offset": 4 + bilinear + 1 + 4,  # and the mask; sum over channels
        "grad:mask": 4 + bilinear + 4,
        "grad:weight": bilinear + 2 + 60,
        "grad:bias": 60,
    }
    grouped = Expectation(DeformConv2dCase(offsets="zero", groups=2, offset_groups=4)).roundings
    assert (grouped["output"], grouped["grad:input"], grouped["grad:mask"]) == (
        7 + 18 + 2,
        2 + 5 + 9,
        2 + 7 + 1,
    )
