"""One operator as an ONNX model of one node, and the arrays that it is fed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import Arguments, Arrays, contiguous, groups, require_dtype, require_held_scale, split_rois

# What each operator is called, and the first opset that says all that is needed. Opset 22 adds bfloat16 to both, but
# ONNX Runtime's kernel of RoiAlign ends at 21.
_NODES = {
    "deform_conv2d": ("DeformConv", 19),
    "roi_align": ("RoiAlign", 16),
    "roi_align_max": ("RoiAlign", 16),
}

OPERATORS = tuple(_NODES)

Feeds = dict[str, np.ndarray]


def attributes(operator: str, arrays: Arrays, arguments: Arguments) -> dict[str, Any]:
    """The node's attributes, in ONNX' terms."""
    if operator == "deform_conv2d":
        group, offset_group = groups(arrays)
        return {
            "kernel_shape": list(arrays["weight"].shape[2:]),
            "strides": list(arguments["stride"]),
            "pads": [*arguments["padding"], *arguments["padding"]],
            "dilations": list(arguments["dilation"]),
            "group": group,
            "offset_group": offset_group,
        }
    require_held_scale("ONNX", arrays, arguments["spatial_scale"])
    return {
        "mode": "max" if operator == "roi_align_max" else "avg",
        "output_height": arguments["output_size"][0],
        "output_width": arguments["output_size"][1],
        "spatial_scale": arguments["spatial_scale"],
        "sampling_ratio": arguments["sampling_ratio"],
        "coordinate_transformation_mode": "half_pixel" if arguments["aligned"] else "output_half_pixel",
    }


def feeds(operator: str, arrays: Arrays) -> dict[str, np.ndarray | None]:
    """The node's inputs in their order; None where an optional one is left out."""
    present = {name: None if array is None else contiguous(array) for name, array in arrays.items()}
    if operator == "deform_conv2d":
        order = ("input", "weight", "offset", "bias", "mask")
        return {name: present.get(name) for name in order}
    images, corners = split_rois(arrays["rois"])
    return {"input": present["input"], "corners": corners, "images": images}


def one_node(operator: str, arrays: Arrays, arguments: Arguments) -> tuple[Any, Feeds]:
    """The model (onnx.ModelProto) and what to feed it; its one output is called output.

    Raises NotImplementedError when ONNX can't say what the arguments ask for.
    """
    from onnx import helper

    require_dtype("ONNX through numpy", arrays, ("float64", "float32", "float16"))
    fed = feeds(operator, arrays)
    names = [name if array is not None else "" for name, array in fed.items()]
    while names and not names[-1]:
        names.pop()
    node_type, opset = _NODES[operator]
    node = helper.make_node(
        node_type,
        names,
        ["output"],
        **attributes(operator, arrays, arguments),
    )
    given = {name: array for name, array in fed.items() if array is not None}
    elements = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info(name, elements[name], array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info("output", elements["input"], None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return model, given
