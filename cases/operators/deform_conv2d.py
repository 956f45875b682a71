"""deform_conv2d: DCNv1 (Dai et al. 2017) without mask, DCNv2 (Zhu et al. 2019) with mask.

input (N, C, H, W); weight (O, C/groups, kh, kw); offset (N, 2*OG*kh*kw, oh, ow), tap by tap, y before x;
mask (N, OG*kh*kw, oh, ow); bias (O,). With OG offset groups over the input channels,

    col[n,c,k,oy,ox] = mask * B(input[n,c]; y, x),  y = oy*stride - padding + ky*dilation + offset_y
    out = weight . col + bias

where B is bilinear and zero outside the image. Conventions at y == -1: "open" gives the offset no gradient
(mmcv, paddle, the papers' code), "closed" the right-hand slope (torchvision; pytorch/vision#6885).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.coordinates import BOUNDARIES, SMOOTH, VOIDING, add_rounded, classify, possible, sample_coordinates
from cases.data import draw, draw_image
from cases.dtypes import DTYPES
from cases.interpolation import BILINEAR_ROUNDINGS
from cases.layouts import LAYOUTS, lay_out
from cases.operator import (
    Arithmetic,
    Constraint,
    Cut,
    Location,
    Operator,
    Tensors,
    at_least,
    one_of,
    with_slope_of,
)

Pair = tuple[int, int]


@dataclass(frozen=True)
class DeformConv2dCase(Case):
    """Axes of deform_conv2d; sizes are (height, width)."""

    OPERATOR: ClassVar[str] = "deform_conv2d"

    batch: int = 2
    in_channels: int = 4
    out_channels: int = 4
    size: Pair = (5, 6)
    kernel: Pair = (3, 3)
    stride: Pair = (1, 1)
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)
    groups: int = 1
    offset_groups: int = 1
    mask: bool = True
    bias: bool = True
    offsets: str = "interior"
    layout: str = "contiguous"
    grad_layout: str = "contiguous"

    @property
    def boundary(self) -> str:
        return self.offsets

    @property
    def hostile(self) -> bool:
        # mmcv floors float64 coordinates in float32 and then reads and writes past the image.
        past_the_image = self.dtype == "float64" and self.offsets.startswith("inside_edge")
        return past_the_image or super().hostile

    @property
    def output_size(self) -> Pair:
        """(oh, ow) of the output."""
        height, width = (
            (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for length, padding, dilation, kernel, stride in zip(
                self.size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )
        return height, width

    @property
    def taps(self) -> int:
        """Kernel positions, kh*kw."""
        return self.kernel[0] * self.kernel[1]


def _why_channels(case: DeformConv2dCase) -> str:
    if case.in_channels % case.groups or case.in_channels % case.offset_groups:
        return "in_channels is not a multiple of groups and offset_groups"
    return ""


def _why_outputs(case: DeformConv2dCase) -> str:
    return "out_channels is not a multiple of groups" if case.out_channels % case.groups else ""


def _why_output_size(case: DeformConv2dCase) -> str:
    return f"the output would be {case.output_size}" if min(case.output_size) < 1 else ""


def _why_distance(case: DeformConv2dCase) -> str:
    nano = case.offsets.endswith("_nano") and case.dtype != "float64"
    return "only float64 tells 1e-9 from the kink" if nano else ""


def _why_quarters(case: DeformConv2dCase) -> str:
    finer = case.data == "integer" and case.offsets.endswith(("_ulp", "_nano", "non_finite"))
    return "that class has no offsets in quarters" if finer else ""


def _why_class(case: DeformConv2dCase) -> str:
    reachable = any(possible(case.offsets, length) for length in case.size)
    return "" if reachable else f"an image of {case.size} has no such coordinates"


_POSITIVE = ("in_channels", "out_channels", "size", "kernel", "stride", "dilation", "groups", "offset_groups")

GEOMETRY = (
    *(at_least(axis, 1) for axis in _POSITIVE),
    *(at_least(axis, 0) for axis in ("batch", "padding")),
    *(one_of(axis, LAYOUTS) for axis in ("layout", "grad_layout")),
    Constraint(("in_channels", "groups", "offset_groups"), _why_channels),
    Constraint(("out_channels", "groups"), _why_outputs),
    Constraint(("size", "kernel", "padding", "dilation"), _why_output_size),
)
COORDINATES = (
    Constraint(("offsets", "dtype"), _why_distance),
    Constraint(("offsets", "data"), _why_quarters),
    Constraint(("offsets", "size"), _why_class),
)


def base_coordinates(case: DeformConv2dCase) -> tuple[np.ndarray, np.ndarray]:
    """Where each tap falls without an offset: y and x, both (kh*kw, oh, ow)."""
    (oh, ow), (kh, kw) = case.output_size, case.kernel
    rows = np.arange(oh) * case.stride[0] - case.padding[0]
    columns = np.arange(ow) * case.stride[1] - case.padding[1]
    tap_y, tap_x = (tap.reshape(-1, 1, 1) for tap in np.divmod(np.arange(kh * kw), kw))
    shape = (kh * kw, oh, ow)
    y = np.broadcast_to(rows.reshape(1, -1, 1) + tap_y * case.dilation[0], shape)
    x = np.broadcast_to(columns.reshape(1, 1, -1) + tap_x * case.dilation[1], shape)
    return y.astype(float), x.astype(float)


def sample_offsets(case: DeformConv2dCase, random: np.random.Generator) -> np.ndarray:
    """Offsets (N, OG, kh*kw, 2, oh, ow) that bring y, x or both of every sample into the case's class."""
    dtype = DTYPES[case.dtype]
    shape = (case.batch, case.offset_groups, case.taps, *case.output_size)
    # 0 and 1 leave x or y beside the class, 2 puts both in it, 3 none: not every sample may come to nothing.
    aims = random.integers(4 if case.offsets in VOIDING else 3, size=shape)
    offsets = []
    for axis, base in enumerate(base_coordinates(case)):
        length, bases = case.size[axis], np.broadcast_to(base, shape)
        companion = "interior" if length >= 2 else "rim"
        aimed_class = case.offsets if possible(case.offsets, length) else companion
        quarters = case.data == "integer"
        aimed = sample_coordinates(aimed_class, length, bases, dtype, random, quarters=quarters)
        beside = sample_coordinates(companion, length, bases, dtype, random, quarters=quarters)
        everywhere = case.offsets in ("zero", "mixed", "interior")
        offsets.append(np.where(((aims != axis) & (aims != 3)) | everywhere, aimed, beside))
    return np.stack(offsets, axis=3)


def positions(case: DeformConv2dCase, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Where the samples fall, rounded as the dtype under test rounds them: y and x, (N, OG, kh*kw, oh, ow).

    A gradient flows to ``offset`` (float64, values of the dtype under test) as if nothing was rounded.
    """
    shape = (case.batch, case.offset_groups, case.taps, 2, *case.output_size)
    both = offset.reshape(shape)
    result = []
    for axis, base in enumerate(base_coordinates(case)):
        exact = both[:, :, :, axis]
        rounded = add_rounded(base, exact.detach().to(DTYPES[case.dtype]))
        result.append(with_slope_of(rounded, exact))
    return result[0], result[1]


def tents(coordinate: Tensor, inside: Tensor, length: int, arithmetic: Arithmetic) -> Tensor:
    """The bilinear weight of each of ``length`` pixels for each coordinate: (..., length)."""
    safe = torch.where(inside, coordinate, torch.zeros_like(coordinate))
    cell = safe.detach().floor()
    fraction = safe - cell
    pixel = torch.arange(length, dtype=torch.float64)
    left, right = (pixel == cell[..., None]).double(), (pixel == cell[..., None] + 1).double()
    weights = arithmetic.one_minus(fraction)[..., None] * left + fraction[..., None] * right
    if arithmetic is Arithmetic.MAJORANT:
        # A weight is a difference of numbers of the coordinate's size, and has their rounding, however small it
        # is; a coordinate that is an integer has none.
        rounding = (fraction.detach() != 0) * (1 + safe.detach().abs()) / BILINEAR_ROUNDINGS
        weights = weights + rounding[..., None] * (left + right)
    return weights * inside[..., None]


def is_inside(coordinate: Tensor, length: int, convention: str) -> Tensor:
    """Whether a sample counts: -1 < y < length when open, -1 <= y < length when closed; never when NaN."""
    above = coordinate >= -1 if convention == "closed" else coordinate > -1
    return (above & (coordinate < length)).detach()


def sampling_weights(
    case: DeformConv2dCase, offset: Tensor, arithmetic: Arithmetic, convention: str
) -> tuple[Tensor, Tensor]:
    """The tents of all samples over rows (N, OG, kh*kw, oh, ow, H) and columns (..., W)."""
    y, x = positions(case, offset)
    height, width = case.size
    inside = is_inside(y, height, convention) & is_inside(x, width, convention)
    return tents(y, inside, height, arithmetic), tents(x, inside, width, arithmetic)


def deformable_columns(
    case: DeformConv2dCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
) -> Tensor:
    """The sampled and masked input, (N, C, kh*kw, oh, ow)."""
    rows, columns = sampling_weights(case, tensors["offset"], arithmetic, convention)
    image = arithmetic.of(tensors["input"])
    channels = case.in_channels // case.offset_groups
    grouped = image.reshape(case.batch, case.offset_groups, channels, *case.size)
    sampled = torch.einsum("ngkpqh,ngkpqw,ngchw->ngckpq", rows, columns, grouped)
    if (mask := tensors.get("mask")) is not None:
        shape = (case.batch, case.offset_groups, 1, case.taps, *case.output_size)
        sampled = sampled * arithmetic.of(mask).reshape(shape)
    return sampled.reshape(case.batch, case.in_channels, case.taps, *case.output_size)


def convolve(case: DeformConv2dCase, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
    """weight . columns + bias, in float64."""
    col = deformable_columns(case, tensors, arithmetic, convention)
    groups, channels = case.groups, case.in_channels // case.groups
    grouped = col.reshape(case.batch, groups, channels, case.taps, *case.output_size)
    weight = arithmetic.of(tensors["weight"])
    weight = weight.reshape(groups, case.out_channels // groups, channels, case.taps)
    out = torch.einsum("ngckpq,gock->ngopq", grouped, weight)
    out = out.reshape(case.batch, case.out_channels, *case.output_size)
    if (bias := tensors.get("bias")) is not None:
        out = out + arithmetic.of(bias).reshape(-1, 1, 1)
    return out


def first_order_roundings(case: DeformConv2dCase, offset: Tensor) -> dict[str, int]:
    """Roundings on the longest path to an element of the output and of each gradient."""
    rows, columns = sampling_weights(case, offset, Arithmetic.SIGNED, "closed")
    hits = torch.einsum("ngkpqh,ngkpqw->nghw", (rows != 0).double(), (columns != 0).double())
    contraction = case.out_channels // case.groups
    group_channels = case.in_channels // case.offset_groups
    pixels = case.batch * case.output_size[0] * case.output_size[1]
    return {
        "output": BILINEAR_ROUNDINGS + case.in_channels // case.groups * case.taps + 2,
        "grad:input": contraction + 5 + int(hits.max().item() if hits.numel() else 0),
        "grad:offset": contraction + BILINEAR_ROUNDINGS + 1 + group_channels,
        "grad:mask": contraction + BILINEAR_ROUNDINGS + group_channels,
        "grad:weight": BILINEAR_ROUNDINGS + 2 + pixels,
        "grad:bias": pixels,
    }


def locate_samples(
    case: DeformConv2dCase, offset: Tensor, quantity: str, index: tuple[int, ...]
) -> tuple[Location, ...]:
    """The samples behind one element of the output, grad:offset or grad:mask; empty for other quantities."""
    kind = quantity.removeprefix("gradgrad:").removeprefix("grad:")
    image, channel, *pixel = index if len(index) == 4 else (0, 0, 0, 0)
    if kind == "offset":
        samples = [divmod(channel // 2, case.taps)]
    elif kind == "mask":
        samples = [divmod(channel, case.taps)]
    elif kind in ("output", "grad_output") and len(index) == 4:
        first = channel // (case.out_channels // case.groups) * (case.in_channels // case.groups)
        group_channels = case.in_channels // case.offset_groups
        offset_groups = {(first + c) // group_channels for c in range(case.in_channels // case.groups)}
        samples = [(group, tap) for group in sorted(offset_groups) for tap in range(case.taps)]
    else:
        return ()
    y, x = (axis.detach().numpy() for axis in positions(case, offset.double()))
    classes_y, classes_x = classify(y, case.size[0]), classify(x, case.size[1])
    where = [(image, group, tap, pixel[0], pixel[1]) for group, tap in samples]
    return tuple(Location(float(y[at]), float(x[at]), f"{classes_y[at]}/{classes_x[at]}") for at in where)


class DeformConv2d(Operator[DeformConv2dCase]):
    """The operator with and without mask, as one; the axis `mask` tells DCNv2 from DCNv1."""

    name = "deform_conv2d"
    case_type = DeformConv2dCase
    leads_family = True
    conventions = ("open", "closed")
    optional = ("bias", "mask")
    void: ClassVar[dict[str, Any]] = {"batch": 0}
    finite_difference_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64",),
        "offsets": SMOOTH,
        "batch": (1, 2),
        "in_channels": (2,),
        "out_channels": (2,),
        "size": ((3, 4),),
        "kernel": ((2, 2), (1, 2)),
        "stride": ((1, 1), (2, 1)),
        "padding": ((0, 0), (1, 0)),
        "dilation": ((1, 1), (1, 2)),
        "groups": (1, 2),
        "offset_groups": (1, 2),
        "mask": (True, False),
        "bias": (True, False),
    }
    large_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float32", "float64"),
        "offsets": ("mixed",),
        "in_channels": (1024,),
        "size": ((5, 9),),
        "kernel": ((5, 5),),
        "padding": ((2, 2),),
        "groups": (1, 2),
        "offset_groups": (2, 1),
    }
    long_axes: ClassVar[dict[str, Any]] = {
        "dtype": ("float64",),
        "in_channels": (3,),
        "out_channels": (8,),
        "batch": (1,),
        "size": ((64, 64),),
    }
    axes: ClassVar[dict[str, Any]] = {
        "offsets": BOUNDARIES,
        "dtype": tuple(DTYPES),
        "batch": (2, 1, 3, 34, 64),
        "in_channels": (4, 1, 2, 6, 12),
        "out_channels": (4, 1, 2, 6),
        "size": ((5, 6), (4, 7), (8, 3), (1, 5), (6, 1), (2, 2)),
        "kernel": ((3, 3), (1, 1), (2, 3), (3, 2), (2, 2), (1, 4)),
        "stride": ((1, 1), (2, 1), (1, 2), (3, 2)),
        "padding": ((1, 1), (0, 0), (1, 0), (0, 2), (2, 1)),
        "dilation": ((1, 1), (2, 1), (1, 3), (2, 2)),
        "groups": (1, 2, 4),
        "offset_groups": (1, 2, 4),
        "mask": (True, False),
        "bias": (True, False),
        "layout": LAYOUTS,
        "grad_layout": LAYOUTS,
        "data": ("real", "integer"),
    }
    smoke_axes: ClassVar[dict[str, Any]] = {
        "dtype": tuple(DTYPES),
        "batch": (2, 34),
        "in_channels": (4, 6),
        "out_channels": (4, 2),
        "size": ((5, 6), (4, 7)),
        "kernel": ((3, 3), (2, 3)),
        "stride": ((1, 1), (2, 1)),
        "padding": ((1, 1), (1, 0)),
        "dilation": ((1, 1), (2, 1), (1, 2)),
        "groups": (1, 2, 4),
        "offset_groups": (1, 2, 4),
        "mask": (True, False),
        "bias": (True, False),
        "layout": ("contiguous", "sliced", "channels_last"),
        "grad_layout": ("contiguous", "transposed"),
        "data": ("real", "integer"),
    }

    def constraints(self) -> tuple[Constraint[DeformConv2dCase], ...]:
        return (*GEOMETRY, *COORDINATES, one_of("offsets", BOUNDARIES))

    def differentiable(self, case: DeformConv2dCase) -> tuple[str, ...]:
        names = ("input", "offset", "weight", "bias", "mask")
        return tuple(name for name in names if getattr(case, name, True))

    def sample(self, case: DeformConv2dCase) -> Tensors:
        random = case.generator()
        pixels = case.output_size
        shapes: dict[str, tuple[int, ...]] = {
            "input": (case.batch, case.in_channels, *case.size),
            "weight": (case.out_channels, case.in_channels // case.groups, *case.kernel),
            "bias": (case.out_channels,),
            "mask": (case.batch, case.offset_groups * case.taps, *pixels),
        }
        tensors = {
            name: (draw_image if name == "input" else draw)(case, random, shape)
            for name, shape in shapes.items()
            if getattr(case, name, True)
        }
        offsets = sample_offsets(case, random)
        shape = (case.batch, 2 * case.offset_groups * case.taps, *pixels)
        tensors["offset"] = torch.as_tensor(offsets.reshape(shape)).to(DTYPES[case.dtype])
        return {name: lay_out(tensor, case.layout) for name, tensor in tensors.items()}

    def cotangent(self, case: DeformConv2dCase, output: Tensor) -> Tensor:
        return lay_out(draw(case, case.generator("grad_output"), tuple(output.shape)), case.grad_layout)

    def arguments(self, case: DeformConv2dCase) -> dict[str, Any]:
        return {"stride": case.stride, "padding": case.padding, "dilation": case.dilation}

    def oracle(
        self, case: DeformConv2dCase, tensors: Tensors, arithmetic: Arithmetic, convention: str
    ) -> Tensor:
        return convolve(case, tensors, arithmetic, convention)

    def roundings(self, case: DeformConv2dCase, tensors: Tensors) -> dict[str, int]:
        return first_order_roundings(case, tensors["offset"].double())

    def cuts(self, case: DeformConv2dCase) -> dict[str, Cut]:
        inputs = {name: 0 for name in ("input", "offset", "mask") if getattr(case, name, True)}
        weights = {name: 0 for name in ("weight", "bias") if getattr(case, name, True)}
        # Every group of outputs reads channels of its own.
        return {"inputs": Cut(inputs, 0)} | ({"weights": Cut(weights, 1)} if case.groups == 1 else {})

    def image_alone(self, case: DeformConv2dCase, tensors: Tensors, image: int) -> tuple[Tensors, list[int]]:
        own = ("input", "offset", "mask")
        return {
            name: tensor[image : image + 1] if name in own else tensor for name, tensor in tensors.items()
        }, [image]

    def larger(self, case: DeformConv2dCase) -> DeformConv2dCase:
        # torch.compile makes a graph of its own for a length of 1, which no other length may become.
        larger = super().larger(case)
        height, width = (
            length if pixels == 1 else longer
            for length, longer, pixels in zip(case.size, larger.size, case.output_size, strict=True)
        )
        return replace(larger, size=(height, width))

    def quantum(self, case: DeformConv2dCase) -> float:
        # At most five tensors in halves and the bilinear weights in sixteenths make one term.
        return 2.0**-9 if case.data == "integer" else 0.0

    def locate(
        self, case: DeformConv2dCase, tensors: Tensors, quantity: str, index: tuple[int, ...]
    ) -> tuple[Location, ...]:
        return locate_samples(case, tensors["offset"], quantity, index)


OPERATOR = DeformConv2d()
