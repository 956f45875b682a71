"""What the frameworks' files share: groups, dtypes, and boxes by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# By name; None where a case lacks an optional one.
Arrays = dict[str, Any]
Arguments = dict[str, Any]


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array in row-major order; the frameworks get no other."""
    return np.ascontiguousarray(array)


def require_dtype(framework: str, arrays: Arrays, dtypes: Sequence[str]) -> None:
    """Raises NotImplementedError when an array has none of the dtypes."""
    found = [array.dtype.name for array in arrays.values() if array is not None]
    if wrong := [dtype for dtype in found if dtype not in dtypes]:
        raise NotImplementedError(f"{framework} computes {' and '.join(dtypes)} here, not {wrong[0]}")


def require_held_scale(framework: str, arrays: Arrays, scale: float) -> None:
    """Raises NotImplementedError when a float64 case has a scale that float32, in which it is kept, does not hold."""
    dtypes = {array.dtype.name for array in arrays.values() if array is not None}
    if "float64" in dtypes and float(np.float32(scale)) != scale:
        raise NotImplementedError(
            f"{framework} keeps spatial_scale in float32, which does not hold {scale!r}"
        )


def groups(arrays: Arrays) -> tuple[int, int]:
    """The weight groups and the offset groups of deform_conv2d, which the shapes imply."""
    image, offset, weight = arrays["input"], arrays["offset"], arrays["weight"]
    taps = weight.shape[2] * weight.shape[3]
    return image.shape[1] // weight.shape[1], offset.shape[1] // (2 * taps)


def split_rois(rois: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The images' numbers (K,) as int64, and the corners (K, 4).

    Raises ValueError when a number is not whole.
    """
    images = rois[:, 0].astype(np.int64)
    if not np.array_equal(images, rois[:, 0]):
        raise ValueError(f"rois must start with an image's number, got {rois[:, 0].tolist()}")
    return images, contiguous(rois[:, 1:])


@dataclass(frozen=True)
class ByImage:
    """Boxes sorted by image: their corners, how many each image has, and which box each of them was."""

    corners: np.ndarray
    counts: np.ndarray
    order: np.ndarray

    def sort(self, per_box: np.ndarray) -> np.ndarray:
        """What belongs to the boxes in their own order, in the sorted one."""
        return contiguous(per_box[self.order])

    def unsort(self, per_sorted_box: np.ndarray) -> np.ndarray:
        """What belongs to the sorted boxes, in their own order."""
        result = np.empty_like(per_sorted_box)
        result[self.order] = per_sorted_box
        return result


def by_image(rois: np.ndarray, batch: int) -> ByImage:
    """Sorts boxes (K, 5) by image, those of one image in their order.

    Raises ValueError when one is of no image.
    """
    images, corners = split_rois(rois)
    if images.size and not 0 <= images.min() <= images.max() < batch:
        raise ValueError(f"rois must be of images 0 to {batch - 1}, got {images.tolist()}")
    order = np.argsort(images, kind="stable")
    return ByImage(contiguous(corners[order]), np.bincount(images, minlength=batch).astype(np.int32), order)
