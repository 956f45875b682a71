"""The provider `openvino`: OpenVINO's deformable convolution and ROIAlign in its CPU plugin; outputs alone.

DeformableConvolution is asked with bilinear_interpolation_pad, without which a sample on the rim is not blended with
the zeros around the image. ROIAlign's 'half_pixel_for_nn' is what others call aligned, 'asymmetric' what they call not
aligned; its 'half_pixel' moves the corners before they are scaled, too, and is another operator.
"""

from __future__ import annotations

import numpy as np

from ._arrays import Arguments, Arrays, contiguous, groups, require_dtype, split_rois


class OpenVino:
    """The installed openvino, on CPU, with float32 arithmetic whatever the processor would prefer."""

    name = "openvino"
    promises_everything = False
    operators = ("deform_conv2d", "roi_align", "roi_align_max")

    def load(self) -> str:
        """Imports openvino, and returns its version. Raises ImportError when it is not there."""
        try:
            import openvino
        except ImportError as error:
            raise ImportError(f"openvino can't be imported: {error}") from error
        version: str = openvino.__version__.partition("-")[0]
        return version

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result. Raises NotImplementedError for float64, which the plugin would round to float32."""
        require_dtype("openvino's CPU plugin", arrays, ("float32", "float16"))
        import openvino
        from openvino import opset9 as ops

        present = {name: contiguous(array) for name, array in arrays.items() if array is not None}
        if (rois := present.pop("rois", None)) is not None:
            present["images"], present["corners"] = split_rois(rois)
        nodes = {
            name: ops.parameter(list(each.shape), each.dtype, name=name) for name, each in present.items()
        }
        if operator == "deform_conv2d":
            group, deformable_group = groups(arrays)
            result = ops.deformable_convolution(
                nodes["input"],
                nodes["offset"],
                nodes["weight"],
                strides=list(arguments["stride"]),
                pads_begin=list(arguments["padding"]),
                pads_end=list(arguments["padding"]),
                dilations=list(arguments["dilation"]),
                mask=nodes.get("mask"),
                group=group,
                deformable_group=deformable_group,
                bilinear_interpolation_pad=True,
            )
            if "bias" in nodes:
                result = ops.add(
                    result, ops.reshape(nodes["bias"], np.array([1, -1, 1, 1]), special_zero=False)
                )
        else:
            result = ops.roi_align(
                nodes["input"],
                nodes["corners"],
                nodes["images"],
                *arguments["output_size"],
                arguments["sampling_ratio"],
                arguments["spatial_scale"],
                "max" if operator == "roi_align_max" else "avg",
                "half_pixel_for_nn" if arguments["aligned"] else "asymmetric",
            )
        model = openvino.Model([result], list(nodes.values()), operator)
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        output: np.ndarray = compiled(present)[0].copy()
        return output


PROVIDER = OpenVino()
