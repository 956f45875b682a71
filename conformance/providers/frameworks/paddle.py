"""The provider `paddle`: PaddlePaddle's operators on CPU, with their gradients.

Its RoI operators want the boxes sorted by image, and how many each image has: they are sorted before, and what
belongs to them is brought back into their order after. Its psroi_pool rounds corners before it scales them, and counts
the last pixel in, as the R-FCN paper's code did: it is ps_roi_pool for a scale of 1 and a last corner less by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ._arrays import Arguments, Arrays, ByImage, by_image, contiguous, groups, require_dtype


class Paddle:
    """`paddle.vision.ops` of the installed PaddlePaddle."""

    name = "paddle"
    promises_everything = False
    operators = ("deform_conv2d", "roi_align", "roi_pool", "ps_roi_pool")
    # The names of the operators there.
    names: ClassVar[dict[str, str]] = {"ps_roi_pool": "psroi_pool"}

    def load(self) -> str:
        """Imports paddle, and returns its version. Raises ImportError when it is not there."""
        try:
            import paddle
        except ImportError as error:
            raise ImportError(f"paddle can't be imported: {error}") from error
        paddle.device.set_device("cpu")
        version: str = paddle.__version__
        return version

    def output(self, operator: str, arrays: Arrays, arguments: Arguments) -> np.ndarray:
        """The operator's result."""
        return self._run(operator, arrays, arguments, None, ())[0]

    def gradients(
        self,
        operator: str,
        arrays: Arrays,
        arguments: Arguments,
        grad_output: np.ndarray,
        wanted: Sequence[str],
    ) -> dict[str, np.ndarray | None]:
        """The gradients of the arrays of these names, None where paddle has none."""
        return self._run(operator, arrays, arguments, grad_output, wanted)[1]

    def _run(
        self,
        operator: str,
        arrays: Arrays,
        arguments: Arguments,
        grad_output: np.ndarray | None,
        wanted: Sequence[str],
    ) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
        require_dtype("paddle on CPU", arrays, ("float64", "float32"))
        import paddle

        sorted_boxes: ByImage | None = None
        present = {name: contiguous(array) for name, array in arrays.items() if array is not None}
        if (rois := present.pop("rois", None)) is not None:
            sorted_boxes = by_image(rois, present["input"].shape[0])
            present["boxes"] = sorted_boxes.corners
            if operator == "ps_roi_pool":
                present["boxes"] = _without_last_pixel(sorted_boxes.corners, arguments["spatial_scale"])
        leaves = {name: paddle.to_tensor(array) for name, array in present.items()}
        for name, leaf in leaves.items():
            leaf.stop_gradient = name not in wanted
        function: Callable[..., Any] = getattr(paddle.vision.ops, self.names.get(operator, operator))
        if sorted_boxes is None:
            result = function(
                leaves["input"],
                leaves["offset"],
                leaves["weight"],
                bias=leaves.get("bias"),
                mask=leaves.get("mask"),
                **dict(zip(("groups", "deformable_groups"), groups(arrays))),
                **arguments,
            )
        else:
            counts = paddle.to_tensor(sorted_boxes.counts)
            result = function(leaves["input"], leaves["boxes"], counts, **arguments)
        unsort = sorted_boxes.unsort if sorted_boxes else contiguous
        gradients: dict[str, np.ndarray | None] = dict.fromkeys(wanted)
        if grad_output is not None:
            cotangent = paddle.to_tensor(
                sorted_boxes.sort(grad_output) if sorted_boxes else contiguous(grad_output)
            )
            known = [name for name in wanted if name in leaves]
            found = paddle.grad([result], [leaves[name] for name in known], [cotangent], allow_unused=True)
            gradients.update(
                (name, None if each is None else each.numpy()) for name, each in zip(known, found)
            )
        return unsort(result.numpy()), gradients


def _without_last_pixel(corners: np.ndarray, scale: float) -> np.ndarray:
    """The corners (K, 4) for psroi_pool.

    Raises NotImplementedError for a scale other than 1, and for a last corner that rounds elsewhere without its pixel,
    as 0.5 does.
    """
    if scale != 1:
        raise NotImplementedError(
            f"paddle's psroi_pool rounds corners before it scales them: scale is {scale}, not 1"
        )
    less: np.ndarray = corners - np.array([0, 0, 1, 1], corners.dtype)
    finite = np.isfinite(corners)
    if not np.array_equal(_round(less)[finite], (_round(corners) - [0, 0, 1, 1])[finite]):
        raise NotImplementedError("paddle's psroi_pool has no box that ends at 0.5")
    return less


def _round(values: np.ndarray) -> np.ndarray:
    """Half away from zero."""
    rounded: np.ndarray = np.trunc(values.astype(np.float64) + np.copysign(0.5, values))
    return rounded


PROVIDER = Paddle()
