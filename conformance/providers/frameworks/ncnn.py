"""The provider `ncnn`: DeformableConv2D, ROIAlign (of detectron2's kind) and ROIPooling on CPU; outputs alone.

They take float32, one image, one box and no groups: images and boxes are given one by one.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from ._arrays import Arguments, Arrays, contiguous, groups, require_dtype, split_rois


class Ncnn:
    """The installed ncnn, with float32 arithmetic and one thread."""

    name = "ncnn"
    promises_everything = False
    operators = ("deform_conv2d", "roi_align", "roi_pool")

    def load(self) -> str:
        """Imports ncnn, and returns its version. Raises ImportError when it is not there."""
        try:
            import ncnn
        except ImportError as error:
            raise ImportError(f"ncnn can't be imported: {error}") from error
        version: str = ncnn.__version__
        return version

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result. Raises NotImplementedError for groups, and for every dtype but float32."""
        require_dtype("ncnn", arrays, ("float32",))
        if operator == "deform_conv2d":
            return _deform_conv2d(arrays, arguments)
        image, rois = arrays["input"], arrays["rois"]
        height, width = arguments["output_size"]
        settings: list[Any] = [width, height, float(arguments["spatial_scale"])]
        if operator == "roi_align":
            detectron2 = 1
            settings += [arguments["sampling_ratio"], int(arguments["aligned"]), detectron2]
        layer = _Layer("ROIAlign" if operator == "roi_align" else "ROIPooling", 2, dict(enumerate(settings)))
        images, corners = split_rois(rois)
        shape = (image.shape[1], height, width)
        return _stack([layer(image[number], box) for number, box in zip(images, corners)], shape)


def _deform_conv2d(arrays: Arrays, arguments: Arguments) -> np.ndarray:
    weight, bias, offset = arrays["weight"], arrays["bias"], arrays["offset"]
    if groups(arrays) != (1, 1):
        raise NotImplementedError(f"ncnn has one group and one offset group, not {groups(arrays)}")
    pairs = {1: weight.shape[2:], 2: arguments["dilation"], 3: arguments["stride"], 4: arguments["padding"]}
    settings = {0: weight.shape[0], 5: int(bias is not None), 6: weight.size}
    for key, (vertical, horizontal) in pairs.items():
        settings.update({key: horizontal, key + 10: vertical})
    # The weights start with a word that says they are float32.
    parameters = b"\0\0\0\0" + contiguous(weight).tobytes()
    parameters += b"" if bias is None else contiguous(bias).tobytes()
    per_image = [array for name in ("input", "offset", "mask") if (array := arrays.get(name)) is not None]
    layer = _Layer("DeformableConv2D", len(per_image), settings, parameters)
    return _stack([layer(*each) for each in zip(*per_image)], (weight.shape[0], *offset.shape[2:]))


class _Layer:
    """A net of one layer, made once and fed arrays."""

    def __init__(self, kind: str, inputs: int, settings: dict[int, Any], parameters: bytes = b"") -> None:
        import ncnn

        names = [f"in{number}" for number in range(inputs)]
        lines = ["7767517", f"{inputs + 1} {inputs + 1}"]
        lines += [f"Input {name} 0 1 {name}" for name in names]
        written = (f"{key}={value!r}" for key, value in settings.items())
        lines.append(f"{kind} layer {inputs} 1 {' '.join(names)} out {' '.join(written)}")
        self._names = names
        self._net = ncnn.Net()
        options = self._net.opt
        options.num_threads = 1
        options.use_vulkan_compute = False
        for option in dir(options):
            if option.startswith(("use_fp16", "use_bf16", "use_int8")):
                setattr(options, option, False)
        if self._net.load_param_mem("\n".join(lines) + "\n") != 0:
            raise ValueError(f"ncnn does not accept the layer {lines[-1]!r}")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "parameters.bin")
            with open(path, "wb") as file:
                file.write(parameters)
            if self._net.load_model(path) != 0:
                raise ValueError(f"ncnn does not accept the parameters of the layer {lines[-1]!r}")

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        import ncnn

        extractor = self._net.create_extractor()
        for name, array in zip(self._names, arrays):
            # A Mat does not own an array's memory, which must outlive the copy.
            owner = contiguous(array)
            extractor.input(name, ncnn.Mat(owner).clone())
        status, out = extractor.extract("out")
        if status != 0:
            raise ValueError(f"ncnn gives no output, but the status {status}")
        return np.array(out)


def _stack(results: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.stack(results) if results else np.zeros((0, *shape), np.float32)


PROVIDER = Ncnn()
