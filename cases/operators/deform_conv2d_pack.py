"""The DCNv1 pack: a layer that predicts its own offsets (Dai et al. 2017).

conv_offset is a plain convolution with 2*OG*kh*kw outputs and the layer's own kernel, stride, padding and
dilation; its output is deform_conv2d's offset. At the start its weight and bias are zero (`offsets=zero`), and
a padded layer then samples on coordinate -1, the edge, all along its border (pytorch/vision#6885).

input (N, C, H, W); weight (O, C/groups, kh, kw); conv_offset.weight (2*OG*kh*kw, C, kh, kw); conv_offset.bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cases.data import draw, draw_image
from cases.dtypes import DTYPES
from cases.layouts import LAYOUTS, lay_out
from cases.operator import Arithmetic, Constraint, Location, Operator, Tensors, one_of, with_slope_of
from cases.operators.deform_conv2d import (
    GEOMETRY,
    DeformConv2dCase,
    convolve,
    first_order_roundings,
    locate_samples,
)

# The rounding steps of inputs and conv_offset, coarse enough that float32 predicts the offsets exactly.
STEP = 1 / 16


@dataclass(frozen=True)
class PackCase(DeformConv2dCase):
    """deform_conv2d's axes; `offsets` is what conv_offset predicts: zero (a fresh layer) or mixed (a trained one)."""

    OPERATOR: ClassVar[str] = "deform_conv2d_pack"

    mask: bool = False
    bias: bool = False
    offsets: str = "zero"


def _why_inexact(case: PackCase) -> str:
    exact = DTYPES[case.dtype].itemsize > 2 and case.data != "integer"
    return "" if exact else "the predicted offsets are exact in float64 and float32, not for data=integer"


def predict(case: DeformConv2dCase, tensors: Tensors, arithmetic: Arithmetic) -> Tensor:
    """What conv_offset gives, (N, outputs, oh, ow): its values always signed, its slopes as the arithmetic says."""
    value = _conv_offset(case, tensors)
    if arithmetic is Arithmetic.SIGNED:
        return value
    absolute = {name: arithmetic.of(tensor) for name, tensor in tensors.items()}
    return with_slope_of(value, _conv_offset(case, absolute))


def _conv_offset(case: DeformConv2dCase, tensors: Tensors) -> Tensor:
    return F.conv2d(
        tensors["input"],
        tensors["conv_offset.weight"],
        tensors["conv_offset.bias"],
        stride=case.stride,
        padding=case.padding,
        dilation=case.dilation,
    )


class DeformConv2dPack(Operator[PackCase]):
    """A module whose gradients include those of conv_offset."""

    name: ClassVar[str] = "deform_conv2d_pack"
    case_type: type[PackCase] = PackCase
    is_module = True
    conventions = ("open", "closed")
    void: ClassVar[dict[str, Any]] = {"batch": 0}
    finite_difference_axes: ClassVar[dict[str, Any]] = {}
    large_axes: ClassVar[dict[str, Any]] = {}
    outputs_per_sample: ClassVar[int] = 2
    axes: ClassVar[dict[str, Any]] = {
        "offsets": ("zero", "mixed"),
        "dtype": ("float64", "float32"),
        "batch": (2, 1, 34),
        "in_channels": (4, 2, 6),
        "out_channels": (4, 2),
        "size": ((5, 6), (4, 7), (1, 5)),
        "kernel": ((3, 3), (1, 1), (2, 3)),
        "stride": ((1, 1), (2, 1)),
        "padding": ((1, 1), (0, 0), (1, 0), (0, 2)),
        "dilation": ((1, 1), (2, 1)),
        "groups": (1, 2),
        "offset_groups": (1, 2),
        "layout": LAYOUTS,
        "grad_layout": LAYOUTS,
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64", "float32"),
        "padding": ((1, 1), (1, 0)),
        "groups": (1, 2),
        "offset_groups": (1, 2),
        "layout": ("contiguous", "channels_last"),
    }

    def constraints(self) -> tuple[Constraint[Any], ...]:
        return (
            *GEOMETRY,
            one_of("offsets", ("zero", "mixed")),
            Constraint(("mask",), self._why_mask),
            Constraint(("dtype", "data"), _why_inexact),
        )

    def _why_mask(self, case: PackCase) -> str:
        return "" if case.mask == self.case_type.mask else "the mask is what tells the two packs apart"

    def differentiable(self, case: PackCase) -> tuple[str, ...]:
        names = ("input", "weight", "conv_offset.weight", "conv_offset.bias")
        return (*names, "bias") if case.bias else names

    def sample(self, case: PackCase) -> Tensors:
        random = case.generator()
        outputs = self.outputs_per_sample * case.offset_groups * case.taps
        tensors = {
            "input": _coarse(draw_image(case, random, (case.batch, case.in_channels, *case.size))),
            "weight": draw(case, random, (case.out_channels, case.in_channels // case.groups, *case.kernel)),
            "bias": draw(case, random, (case.out_channels,)),
            "conv_offset.weight": _coarse(draw(case, random, (outputs, case.in_channels, *case.kernel)) / 2),
            "conv_offset.bias": _coarse(draw(case, random, (outputs,))),
        }
        if case.offsets == "zero":
            tensors["conv_offset.weight"].zero_()
            tensors["conv_offset.bias"].zero_()
        tensors["input"] = lay_out(tensors["input"], case.layout)
        return {name: tensors[name] for name in self.differentiable(case)}

    def cotangent(self, case: PackCase, output: Tensor) -> Tensor:
        return lay_out(draw(case, case.generator("grad_output"), tuple(output.shape)), case.grad_layout)

    def arguments(self, case: PackCase) -> dict[str, Any]:
        names = ("in_channels", "out_channels", "stride", "padding", "dilation", "groups", "offset_groups")
        arguments = {name: getattr(case, name) for name in names}
        return {
            **arguments,
            "kernel_size": case.kernel,
            "dtype": DTYPES[case.dtype],
            "device": torch.device(case.device),
        }

    def oracle(self, case: PackCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        return convolve(
            case, {**tensors, "offset": predict(case, tensors, arithmetic)}, arithmetic, convention
        )

    def roundings(self, case: PackCase, tensors: Tensors) -> dict[str, int]:
        predicted = predict(
            case, {name: tensor.double() for name, tensor in tensors.items()}, Arithmetic.SIGNED
        )
        offset = predicted[:, : 2 * case.offset_groups * case.taps]
        layer = first_order_roundings(case, offset)
        # The sigmoid and its slope add a handful, conv_offset its own sums.
        per_sample = max(layer["grad:offset"], layer["grad:mask"]) + 6
        pixels = case.batch * case.output_size[0] * case.output_size[1]
        outputs = self.outputs_per_sample * case.offset_groups * case.taps
        return {
            "output": layer["output"] + 6,
            "grad:input": layer["grad:input"] + per_sample + outputs * case.taps,
            "grad:weight": layer["grad:weight"] + 6,
            "grad:bias": layer["grad:bias"],
            "grad:conv_offset.weight": per_sample + pixels,
            "grad:conv_offset.bias": per_sample + pixels,
        }

    def locate(
        self, case: PackCase, tensors: Tensors, quantity: str, index: tuple[int, ...]
    ) -> tuple[Location, ...]:
        if quantity != "output":
            return ()
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        offset = predict(case, wide, Arithmetic.SIGNED)[:, : 2 * case.offset_groups * case.taps]
        return locate_samples(case, offset, quantity, index)


def _coarse(values: Tensor) -> Tensor:
    return torch.as_tensor(np.round(values.numpy() / STEP) * STEP)


OPERATOR = DeformConv2dPack()
