"""The DCNv2 pack: a layer that predicts its own offsets and mask (Zhu et al. 2019).

conv_offset has 3*OG*kh*kw outputs: the first two thirds are the offset, the sigmoid of the last is the mask.
Otherwise as `cases.operators.deform_conv2d_pack`, with a bias (O,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cases.operator import Arithmetic, Tensors, with_slope_of
from cases.operators.deform_conv2d import convolve
from cases.operators.deform_conv2d_pack import DeformConv2dPack, PackCase, predict


@dataclass(frozen=True)
class ModulatedPackCase(PackCase):
    """The DCNv1 pack's axes, with a mask and, mostly, a bias."""

    OPERATOR: ClassVar[str] = "modulated_deform_conv2d_pack"

    mask: bool = True
    bias: bool = True


class ModulatedDeformConv2dPack(DeformConv2dPack):
    """A module whose gradients include those of conv_offset, through the sigmoid as well."""

    name = "modulated_deform_conv2d_pack"
    case_type = ModulatedPackCase
    leads_family = True
    outputs_per_sample = 3
    axes: ClassVar[dict[str, Any]] = {**DeformConv2dPack.axes, "bias": (True, False)}

    def arguments(self, case: PackCase) -> dict[str, Any]:
        return {**super().arguments(case), "bias": case.bias}

    def oracle(self, case: PackCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        predicted = predict(case, tensors, arithmetic)
        split = 2 * case.offset_groups * case.taps
        layer = {**tensors, "offset": predicted[:, :split], "mask": sigmoid(predicted[:, split:], arithmetic)}
        return convolve(case, layer, arithmetic, convention)


def sigmoid(logits: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The logistic function, whose slope s*(1 - s) counts as s*(1 + s) in the majorant."""
    value = torch.sigmoid(logits)
    if arithmetic is Arithmetic.SIGNED:
        return value
    return with_slope_of(value, (value * (1 + value)).detach() * logits)


OPERATOR = ModulatedDeformConv2dPack()
