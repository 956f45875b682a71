"""The operators and their gradients as explicit sums over plain float64 loops, for tests of the oracles.

Written from the definitions alone (Dai et al. 2017, Zhu et al. 2019, He et al. 2017), and knows nothing of
`cases`. With ``absolute`` every tensor is made absolute and every subtraction is an addition. ``excess(y)``
is what a bilinear weight along one axis counts in addition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Pair = tuple[int, int]
Excess = Callable[[float], float]


def no_excess(coordinate: float) -> float:
    """The weights as they are."""
    return 0.0


@dataclass(frozen=True)
class DeformConv:
    """The geometry of deform_conv2d; ``closed`` takes -1 <= y < H for inside the image, else -1 < y < H."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    offset_groups: int
    closed: bool = False
    absolute: bool = False
    excess: Excess = no_excess
    kind: type[np.floating] = np.float64

    def _inside(self, y: float, length: int) -> bool:
        return (y >= -1 if self.closed else y > -1) and y < length

    def _samples(self, offset: Array, kernel: Pair) -> Iterator[tuple[tuple[int, ...], float, float]]:
        """(n, offset group, tap, oy, ox) and y, x of every sample, coordinates rounded once to ``kind``."""
        kh, kw = kernel
        n_images, _, oh, ow = offset.shape
        for n, og, k, oy, ox in np.ndindex(n_images, self.offset_groups, kh * kw, oh, ow):
            ky, kx = divmod(k, kw)
            channel = 2 * (og * kh * kw + k)
            y = oy * self.stride[0] - self.padding[0] + ky * self.dilation[0] + offset[n, channel, oy, ox]
            x = ox * self.stride[1] - self.padding[1] + kx * self.dilation[1] + offset[n, channel + 1, oy, ox]
            yield (n, og, k, oy, ox), float(self.kind(y)), float(self.kind(x))

    def _axis(self, y: float, length: int) -> list[tuple[int, float, float]]:
        """Pixel, bilinear weight and its slope, of the two pixels around a coordinate (slope +-1)."""
        cell = math.floor(y)
        near, far = 1 - (y - cell), y - cell
        minus = 1.0 if self.absolute else -1.0
        more = self.excess(y) if self.absolute else 0.0
        both = [(cell, near + more, minus), (cell + 1, far + more, 1.0)]
        return [(pixel, weight, slope) for pixel, weight, slope in both if 0 <= pixel < length]

    def __call__(
        self,
        image: Array,
        offset: Array,
        weight: Array,
        bias: Array | None,
        mask: Array | None,
        grad: Array,
    ) -> dict[str, Array]:
        """``output`` and, under grad_output, ``grad:NAME`` of each tensor that is not None."""
        if self.absolute:
            image, weight, grad = np.abs(image), np.abs(weight), np.abs(grad)
            bias, mask = (None if array is None else np.abs(array) for array in (bias, mask))
        n_images, channels, height, width = image.shape
        outputs, group_channels, kh, kw = weight.shape
        oh, ow = offset.shape[2:]
        taps = kh * kw
        out = np.zeros((n_images, outputs, oh, ow))
        if bias is not None:
            out += bias[None, :, None, None]
        d_image, d_offset, d_weight = (np.zeros(array.shape) for array in (image, offset, weight))
        d_mask = np.zeros((n_images, self.offset_groups * taps, oh, ow))
        for (n, og, k, oy, ox), y, x in self._samples(offset, (kh, kw)):
            if not (self._inside(y, height) and self._inside(x, width)):
                continue
            ky, kx = divmod(k, kw)
            m = 1.0 if mask is None else mask[n, og * taps + k, oy, ox]
            corners = list(itertools.product(self._axis(y, height), self._axis(x, width)))
            per_group = channels // self.offset_groups
            for c in range(og * per_group, (og + 1) * per_group):
                value = sum(wy * wx * image[n, c, py, px] for (py, wy, _), (px, wx, _) in corners)
                slope_y = sum(sy * wx * image[n, c, py, px] for (py, _, sy), (px, wx, _) in corners)
                slope_x = sum(wy * sx * image[n, c, py, px] for (py, wy, _), (px, _, sx) in corners)
                group, local = divmod(c, group_channels)
                first = group * (outputs // self.groups)
                for o in range(first, first + outputs // self.groups):
                    w = weight[o, local, ky, kx]
                    out[n, o, oy, ox] += w * m * value
                    g = grad[n, o, oy, ox]
                    d_weight[o, local, ky, kx] += g * m * value
                    d_mask[n, og * taps + k, oy, ox] += g * w * value
                    d_offset[n, 2 * (og * taps + k), oy, ox] += g * w * m * slope_y
                    d_offset[n, 2 * (og * taps + k) + 1, oy, ox] += g * w * m * slope_x
                    for (py, wy, _), (px, wx, _) in corners:
                        d_image[n, c, py, px] += g * w * m * wy * wx
        result: dict[str, Array] = {"output": out, "grad:input": d_image}
        result |= {"grad:offset": d_offset, "grad:weight": d_weight}
        if mask is not None:
            result["grad:mask"] = d_mask
        if bias is not None:
            result["grad:bias"] = grad.sum((0, 2, 3))
        return result


def convolution(
    image: Array, weight: Array, bias: Array, stride: Pair, padding: Pair, dilation: Pair
) -> Array:
    """A plain convolution (N, O, oh, ow)."""
    size = [
        (length + 2 * p - d * (k - 1) - 1) // s + 1
        for length, p, d, k, s in zip(
            image.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    out: Array = np.zeros((image.shape[0], weight.shape[0], *size)) + bias[None, :, None, None]
    for n, o, c, oy, ox, y, x, ky, kx in _convolution_terms(
        image, weight, out.shape, stride, padding, dilation
    ):
        out[n, o, oy, ox] += weight[o, c, ky, kx] * image[n, c, y, x]
    return out


def convolution_gradients(
    image: Array, weight: Array, grad: Array, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Array, Array, Array]:
    """The gradients of `convolution` by image, weight and bias."""
    d_image, d_weight = np.zeros(image.shape), np.zeros(weight.shape)
    for n, o, c, oy, ox, y, x, ky, kx in _convolution_terms(
        image, weight, grad.shape, stride, padding, dilation
    ):
        d_image[n, c, y, x] += weight[o, c, ky, kx] * grad[n, o, oy, ox]
        d_weight[o, c, ky, kx] += image[n, c, y, x] * grad[n, o, oy, ox]
    return d_image, d_weight, grad.sum((0, 2, 3))


def _convolution_terms(
    image: Array, weight: Array, output_shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair
) -> Iterator[tuple[int, ...]]:
    for n, o, oy, ox, c, ky, kx in np.ndindex(*output_shape, *weight.shape[1:]):
        y = oy * stride[0] - padding[0] + ky * dilation[0]
        x = ox * stride[1] - padding[1] + kx * dilation[1]
        if 0 <= y < image.shape[2] and 0 <= x < image.shape[3]:
            yield n, o, c, oy, ox, y, x, ky, kx


def roi_align(
    image: Array,
    rois: Array,
    grad: Array,
    *,
    output_size: Pair,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> dict[str, Array]:
    """``output`` and ``grad:input`` under grad_output; positive terms only, when all tensors are."""
    out = np.zeros((len(rois), image.shape[1], *output_size))
    d_image = np.zeros(image.shape)
    shift = 0.5 if aligned else 0.0
    for r, (n, *corners) in enumerate(rois):
        if not np.isfinite(corners).all():
            continue
        x1, y1, x2, y2 = (corner * spatial_scale - shift for corner in corners)
        width, height = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1.0), max(y2 - y1, 1.0))
        bin_h, bin_w = height / output_size[0], width / output_size[1]
        grid_h, grid_w = (sampling_ratio or max(math.ceil(size), 0) for size in (bin_h, bin_w))
        share = 1 / max(grid_h * grid_w, 1)
        for py, px, iy, ix in np.ndindex(*output_size, grid_h, grid_w):
            y = y1 + py * bin_h + (iy + 0.5) * bin_h / grid_h
            x = x1 + px * bin_w + (ix + 0.5) * bin_w / grid_w
            rows, columns = (_clamped(*of) for of in ((y, image.shape[2]), (x, image.shape[3])))
            for (row, wy), (column, wx) in itertools.product(rows, columns):
                weight = wy * wx * share
                out[r, :, py, px] += weight * image[int(n), :, row, column]
                d_image[int(n), :, row, column] += weight * grad[r, :, py, px]
    return {"output": out, "grad:input": d_image}


def _clamped(y: float, length: int) -> list[tuple[int, float]]:
    """The pixels of a RoIAlign sample and their weights; none beyond -1 ... length."""
    if y < -1 or y > length:
        return []
    y = min(max(y, 0.0), length - 1.0)
    cell = math.floor(y)
    return [(cell, 1 - (y - cell))] + ([(cell + 1, y - cell)] if cell + 1 < length else [])
