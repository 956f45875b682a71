"""Arguments of the operators: what they must be, in one sentence each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BOUNDARIES = ("open", "closed")
MODES = ("avg", "max")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# A bin costs its square; nobody samples a bin a million times on purpose.
MAX_SAMPLING_RATIO = 1024
# What float32 rounds to 0 is at most the one, and to infinity at least the other.
FLOAT32_ZERO, FLOAT32_INFINITY = 2.0**-150, 2.0**128 - 2.0**103

Pair = tuple[int, int]


class Window(NamedTuple):
    """How the kernel moves over the image, per axis (vertical, horizontal), in pixels."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def output_size(self, image: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Rows and columns of the result for an image of (H, W) and a kernel of (kh, kw)."""
        rows, columns = (
            (image[axis] + 2 * self.padding[axis] - self.dilation[axis] * (kernel[axis] - 1) - 1)
            // self.stride[axis]
            + 1
            for axis in (0, 1)
        )
        return rows, columns


def shown(value: Any) -> str:
    """A wrong value as a message shows it: on one line, and not a whole tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" if not value.is_nested else "a nested tensor"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def pair(name: str, value: Any, least: int) -> Pair:
    """`value` as (vertical, horizontal); an int stands for both. Raises TypeError or ValueError."""
    values = tuple(value) if isinstance(value, (tuple, list, torch.Size)) else (value, value)
    if len(values) != 2 or not all(
        isinstance(v, (int, torch.SymInt)) and not isinstance(v, bool) for v in values
    ):
        raise TypeError(f"{name} must be an int or a pair of ints, got {shown(value)}")
    if any(v < least for v in values):
        raise ValueError(f"{name} must be at least {least}, got {shown(value)}")
    if any(v >= 2**31 for v in values):
        raise ValueError(f"{name} must be below 2**31, got {shown(value)}")
    return values[0], values[1]


def boundary(value: Any) -> bool:
    """Whether the boundary is the closed one. Raises ValueError for anything but "open" and "closed"."""
    if value not in BOUNDARIES:
        raise ValueError(f'boundary must be "open" or "closed", got {shown(value)}')
    return bool(value == "closed")


def image(value: Any) -> None:
    """`input` is a floating (N, C, H, W) tensor; only N may be 0. Raises TypeError or ValueError."""
    _strided_tensor("input", value)
    if value.dtype not in DTYPES:
        raise TypeError(f"input must be float64, float32, float16 or bfloat16, got {value.dtype}")
    if value.dim() != 4:
        raise ValueError(f"input must have 4 dimensions (N, C, H, W), got shape {tuple(value.shape)}")
    if 0 in value.shape[1:]:
        raise ValueError(f"input must have C, H and W of at least 1, got shape {tuple(value.shape)}")


def like_input(name: str, value: Any, input: Tensor, dimensions: str) -> None:
    """`value` has input's dtype and device and the named dimensions. Raises TypeError or ValueError."""
    _strided_tensor(name, value)
    if value.dtype != input.dtype:
        raise TypeError(f"{name} must have input's dtype {input.dtype}, got {value.dtype}")
    if value.device != input.device:
        raise ValueError(f"{name} must be on input's device {input.device}, got {value.device}")
    expected = dimensions.count(",") + 1 if dimensions[-2] != "," else 1
    if value.dim() != expected:
        raise ValueError(
            f"{name} must have {expected} dimension{'s' * (expected > 1)} {dimensions}, "
            f"got shape {tuple(value.shape)}"
        )


def deform_conv2d(
    input: Any, offset: Any, weight: Any, bias: Any, window: Window, mask: Any
) -> tuple[int, int]:
    """Raises TypeError or ValueError for tensors that don't fit together; returns groups, offset groups."""
    image(input)
    like_input("offset", offset, input, "(N, 2*OG*kh*kw, oh, ow)")
    like_input("weight", weight, input, "(O, C/groups, kh, kw)")
    n, c, h, w = input.shape
    o, c_per_group, kh, kw = weight.shape
    if 0 in weight.shape:
        raise ValueError(f"weight must not have an empty dimension, got shape {tuple(weight.shape)}")
    if c % c_per_group:
        raise ValueError(
            f"weight's dimension 1 (C/groups) must divide the {c} channels of input, got {c_per_group}"
        )
    groups = c // c_per_group
    if o % groups:
        raise ValueError(
            f"weight's dimension 0 (O) must be a multiple of the {groups} groups that its dimension 1 "
            f"of {c_per_group} makes of the {c} channels of input, got {o}"
        )

    rows, columns = window.output_size((h, w), (kh, kw))
    if rows < 1 or columns < 1:
        raise ValueError(
            f"input of {h} x {w} is too small for weight's kernel of {kh} x {kw} with stride "
            f"{window.stride}, padding {window.padding} and dilation {window.dilation}: "
            f"the output would be {rows} x {columns}"
        )
    taps = kh * kw
    channels = offset.shape[1]
    if channels == 0 or channels % (2 * taps) or c % (channels // (2 * taps)):
        raise ValueError(
            f"offset's dimension 1 must be 2*OG*{kh}*{kw} with OG a divisor of the {c} channels of input, "
            f"got {channels}"
        )
    offset_groups = channels // (2 * taps)
    expected: tuple[int, ...] = (n, channels, rows, columns)
    if tuple(offset.shape) != expected:
        raise ValueError(f"offset must have shape {expected}, got {tuple(offset.shape)}")
    if mask is not None:
        like_input("mask", mask, input, "(N, OG*kh*kw, oh, ow)")
        expected = (n, offset_groups * taps, rows, columns)
        if tuple(mask.shape) != expected:
            raise ValueError(f"mask must have shape {expected}, got {tuple(mask.shape)}")
    if bias is not None:
        like_input("bias", bias, input, "(O,)")
        if bias.shape[0] != o:
            raise ValueError(f"bias must have weight's {o} output channels, got shape {tuple(bias.shape)}")
    return groups, offset_groups


def roi_align(
    input: Any,
    boxes: Any,
    output_size: Any,
    spatial_scale: Any,
    sampling_ratio: Any,
    aligned: Any,
    mode: Any,
    rois_grad: Any,
) -> tuple[Tensor, Pair]:
    """Raises TypeError or ValueError for arguments that don't fit; returns rois (K, 5), output size."""
    rois, size = roi_pool(input, boxes, output_size, spatial_scale)
    _sampling_ratio(sampling_ratio)
    for name, value in (("aligned", aligned), ("rois_grad", rois_grad)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {shown(value)}")
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f'mode must be "avg" or "max", got {shown(mode)}')
    return rois, size


def roi_pool(input: Any, boxes: Any, output_size: Any, spatial_scale: Any) -> tuple[Tensor, Pair]:
    """Raises TypeError or ValueError for arguments that don't fit; returns rois (K, 5), output size."""
    image(input)
    size = pair("output_size", output_size, 1)
    if size[0] * size[1] >= 2**31:
        raise ValueError(f"output_size must be below 2**31 bins, got {shown(output_size)}")
    if isinstance(spatial_scale, bool) or not isinstance(spatial_scale, (int, float)):
        raise TypeError(f"spatial_scale must be a number, got {shown(spatial_scale)}")
    if not 0 < spatial_scale <= sys.float_info.max:  # which an int may be beyond
        raise ValueError(f"spatial_scale must be positive and finite, got {shown(spatial_scale)}")
    if input.dtype != torch.float64 and not FLOAT32_ZERO < spatial_scale < FLOAT32_INFINITY:
        raise ValueError(
            f"spatial_scale must be positive and finite in float32 for an input of {input.dtype}, "
            f"got {shown(spatial_scale)}"
        )

    if isinstance(boxes, (list, tuple)):
        return _join(boxes, input), size
    like_input("boxes", boxes, input, "(K, 5)")
    if boxes.shape[1] != 5:
        raise ValueError(
            f"boxes must have shape (K, 5): batch index, x1, y1, x2, y2; got {tuple(boxes.shape)}"
        )
    return boxes, size


def ps_roi_align(
    input: Any, boxes: Any, output_size: Any, spatial_scale: Any, sampling_ratio: Any
) -> tuple[Tensor, Pair]:
    """Raises TypeError or ValueError for arguments that don't fit; returns rois (K, 5), output size."""
    rois, size = ps_roi_pool(input, boxes, output_size, spatial_scale)
    _sampling_ratio(sampling_ratio)
    return rois, size


def ps_roi_pool(input: Any, boxes: Any, output_size: Any, spatial_scale: Any) -> tuple[Tensor, Pair]:
    """Raises TypeError or ValueError for arguments that don't fit; returns rois (K, 5), output size."""
    rois, size = roi_pool(input, boxes, output_size, spatial_scale)
    bins = size[0] * size[1]
    if input.shape[1] % bins:
        raise ValueError(
            f"input's channels must be a multiple of output_size's {bins} bins, got {input.shape[1]}"
        )
    return rois, size


def _sampling_ratio(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"sampling_ratio must be an int, got {shown(value)}")
    if value > MAX_SAMPLING_RATIO:
        raise ValueError(f"sampling_ratio must be at most {MAX_SAMPLING_RATIO}, got {shown(value)}")
    if value < -(2**63):
        raise ValueError(f"sampling_ratio must be at least -2**63, got {shown(value)}")


def _join(boxes: Sequence[Any], input: Tensor) -> Tensor:
    """One (L, 4) tensor per image -> (K, 5), the image's number in front."""
    if len(boxes) != input.shape[0]:
        raise ValueError(
            f"boxes must be a list with one tensor for each of the {input.shape[0]} images, got {len(boxes)}"
        )
    rows = []
    for number, value in enumerate(boxes):
        name = f"boxes[{number}]"
        like_input(name, value, input, "(L, 4)")
        if value.shape[1] != 4:
            raise ValueError(f"{name} must have shape (L, 4): x1, y1, x2, y2; got {tuple(value.shape)}")
        index = value.new_full((value.shape[0], 1), number)
        # bfloat16 counts to 256, float16 to 2048: a batch index beyond must not become another image's.
        if len(boxes) > 256 and int(torch.tensor(number, dtype=value.dtype)) != number:
            raise ValueError(f"boxes must not be a list of more images than {value.dtype} can number")
        rows.append(torch.cat((index, value), dim=1))
    return torch.cat(rows) if rows else input.new_zeros((0, 5))


def batch_indices(rois: Tensor, images: int) -> None:
    """Raises ValueError unless every roi's batch index is an integer in [0, images). Waits for the device."""
    index = rois[:, 0]
    valid = (index >= 0) & (index < images) & (index == index.floor())
    if not bool(valid.all()):
        raise ValueError(
            f"boxes must hold batch indices that are integers from 0 to {images - 1}, "
            f"got {index[~valid][0].item()}"
        )


def channels(in_channels: Any, out_channels: Any, groups: Any) -> None:
    """The channels of a module are positive ints that groups divide. Raises TypeError or ValueError."""
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels), ("groups", groups)):
        _positive(name, value)
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        if value % groups:
            raise ValueError(f"{name} must be a multiple of groups {groups}, got {value}")


def parameters(bias: Any, dtype: Any) -> None:
    """A module's bias is a bool and its dtype one of the kernels', or None. Raises TypeError."""
    if not isinstance(bias, bool):
        raise TypeError(f"bias must be a bool, got {shown(bias)}")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, got {shown(dtype)}")


def layer_input(input: Any, weight: Tensor, groups: int, window: Window) -> None:
    """`input` is an image that a layer of this weight can convolve. Raises TypeError or ValueError."""
    image(input)
    channels = groups * weight.shape[1]
    if input.shape[1] != channels:
        raise ValueError(f"input must have the layer's {channels} channels, got shape {tuple(input.shape)}")
    rows, columns = window.output_size(input.shape[2:], weight.shape[2:])
    if rows < 1 or columns < 1:
        raise ValueError(
            f"input of {input.shape[2]} x {input.shape[3]} is too small for the layer: "
            f"the output would be {rows} x {columns}"
        )
    if input.device != weight.device:
        raise ValueError(f"input must be on the layer's device {weight.device}, got {input.device}")


def offset_groups(value: Any, in_channels: int) -> None:
    """deform_groups is a positive int that divides in_channels. Raises TypeError or ValueError."""
    _positive("deform_groups", value)
    if in_channels % value:
        raise ValueError(f"deform_groups must divide the {in_channels} in_channels, got {value}")


def _strided_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {kind}")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
