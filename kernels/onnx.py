"""Export to ONNX: how the operators here are written in it.

    torch.onnx.export(model, inputs, "model.onnx", custom_translation_table=kernels.onnx.translation_table())

needs the packages onnx and onnxscript. `deform_conv2d` becomes DeformConv, of opset 19, and `roi_align` in mode "avg"
RoiAlign. The others have no translation: RoiAlign's mode "max" is the largest of the samples' weighted corners, not of
the samples, in ONNX Runtime and ONNX' own evaluator; MaxRoiPool lacks the argmax that our operator returns as well; and
the position-sensitive ones have no counterpart. The number of channels must be static. `boundary` makes no difference,
as it concerns gradients alone; ONNX does not say what NaN offsets and boxes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels import library


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The argument ``custom_translation_table`` of torch.onnx.export (with dynamo, its default).

    Raises ImportError without onnxscript, BuildError when the operators can't be built.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("export to ONNX needs onnxscript: pip install onnx onnxscript") from error
    library.load()
    operators = torch.ops.gradparity
    return {operators.deform_conv2d.default: _deform_conv2d, operators.roi_align.default: _roi_align}


def _deform_conv2d(
    input: Any,
    offset: Any,
    weight: Any,
    mask: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    closed: bool,
) -> Any:
    from onnxscript import opset19

    channels, group_channels = _static(input, 1), _static(weight, 1)
    kernel = [_static(weight, axis) for axis in (2, 3)]
    return opset19.DeformConv(
        input,
        weight,
        offset,
        bias,
        mask,
        kernel_shape=kernel,
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
        group=channels // group_channels,
        offset_group=_static(offset, 1) // (2 * kernel[0] * kernel[1]),
    )


def _roi_align(
    input: Any,
    rois: Any,
    winner: Any,
    direction: Any,
    second_direction: Any,
    output_size: Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    from onnxscript import opset16

    if any(each is not None for each in (winner, direction, second_direction)):
        raise NotImplementedError("ONNX has no derivative of RoiAlign")
    images = opset16.Cast(opset16.Squeeze(opset16.Slice(rois, [0], [1], [1]), [1]), to=_INT64)
    return opset16.RoiAlign(
        input,
        opset16.Slice(rois, [1], [5], [1]),
        images,
        output_height=output_size[0],
        output_width=output_size[1],
        spatial_scale=spatial_scale,
        sampling_ratio=max(sampling_ratio, 0),
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
    )


# onnx.TensorProto.INT64
_INT64 = 7


def _static(value: Any, axis: int) -> int:
    """The length of an axis. Raises ValueError when it is only known later."""
    length = value.shape[axis]
    if not isinstance(length, int):
        raise ValueError(f"{value.name}: axis {axis} is dynamic, expected a static one for ONNX' attributes")
    return length
