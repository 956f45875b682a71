"""The operators and their gradients as explicit sums over plain float64 loops, for tests of the oracles.

Written from the definitions alone (Girshick 2015, Dai et al. 2016 and 2017, He et al. 2017, Zhu et al. 2019), and
knows nothing of `cases`. With ``absolute`` every tensor is made absolute and every subtraction is an addition.
``excess(y)`` is what a bilinear weight along one axis counts in addition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

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


@dataclass(frozen=True)
class RoIAlign:
    """The geometry of RoIAlign; ``absolute`` makes every tensor absolute and every subtraction an addition."""

    output_size: Pair
    spatial_scale: float
    sampling_ratio: int
    aligned: bool
    position_sensitive: bool = False
    absolute: bool = False

    def __call__(self, image: Array, rois: Array, grad: Array) -> dict[str, Array]:
        """``output`` and, under grad_output, ``grad:input`` and ``grad:rois``; the mean of all samples."""
        if self.absolute:
            image, grad = np.abs(image), np.abs(grad)
        out, d_image, d_rois = np.zeros(grad.shape), np.zeros(image.shape), np.zeros(rois.shape)
        for r, (py, px), samples in self._bins(rois, image.shape[2:]):
            n = int(rois[r, 0])
            for c in range(grad.shape[1]):
                plane = self._plane(c, py, px)
                g = grad[r, c, py, px] / max(len(samples), 1)
                for y, x in samples:
                    for (row, wy, sy), (column, wx, sx) in itertools.product(y.weights, x.weights):
                        out[r, c, py, px] += wy * wx * image[n, plane, row, column] / len(samples)
                        d_image[n, plane, row, column] += g * wy * wx
                        slope_y, slope_x = (image[n, plane, row, column] * s for s in (sy * wx, wy * sx))
                        d_rois[r, 1:] += g * np.array(
                            [
                                slope_x * x.by_first,
                                slope_y * y.by_first,
                                slope_x * x.by_last,
                                slope_y * y.by_last,
                            ]
                        )
        return {"output": out, "grad:input": d_image, "grad:rois": d_rois}

    def maximum(self, image: Array, rois: Array, grad: Array) -> dict[str, Array]:
        """The same of the largest sample of each bin, the first of equal ones; ``grad:input`` only."""
        out, d_image = np.zeros(grad.shape), np.zeros(image.shape)
        for r, (py, px), samples in self._bins(rois, image.shape[2:]):
            n = int(rois[r, 0])
            for c in range(grad.shape[1]):
                best, corners = -math.inf, []
                for y, x in samples:
                    terms = [
                        (row, column, wy * wx)
                        for (row, wy, _), (column, wx, _) in itertools.product(y.weights, x.weights)
                    ]
                    value = sum(weight * image[n, c, row, column] for row, column, weight in terms)
                    # Samples that are equal but for the rounding of this sum are one tie.
                    if value > best + 1e-13 * abs(value):
                        best, corners = value, terms
                out[r, c, py, px] = best if samples else 0
                for row, column, weight in corners:
                    d_image[n, c, row, column] += weight * grad[r, c, py, px]
        return {"output": out, "grad:input": d_image}

    def _plane(self, channel: int, py: int, px: int) -> int:
        if not self.position_sensitive:
            return channel
        return (channel * self.output_size[0] + py) * self.output_size[1] + px

    def _bins(
        self, rois: Array, size: tuple[int, ...]
    ) -> Iterator[tuple[int, Pair, list[tuple[_Sample, _Sample]]]]:
        """Number of the box, bin, and its samples in row-major order."""
        for r, (_, x1, y1, x2, y2) in enumerate(rois):
            if not np.isfinite([x1, y1, x2, y2]).all():
                continue
            for py, px in np.ndindex(*self.output_size):
                rows = self._samples(y1, y2, py, self.output_size[0], size[0])
                columns = self._samples(x1, x2, px, self.output_size[1], size[1])
                yield r, (py, px), list(itertools.product(rows, columns))

    def _samples(self, first: float, last: float, number: int, bins: int, length: int) -> list[_Sample]:
        start = first * self.spatial_scale - (0.5 if self.aligned else 0.0)
        extent = (last - first) * self.spatial_scale
        widened = not self.aligned and last * self.spatial_scale - first * self.spatial_scale < 1
        if widened:
            extent = 1.0
        grid = self.sampling_ratio or max(math.ceil(extent / bins), 0)
        samples = []
        for i in range(grid):
            t = (number + (i + 0.5) / grid) / bins
            y = start + number * (extent / bins) + (i + 0.5) * (extent / bins) / grid
            by_first, by_last = (1.0, 0.0) if widened else (1 - t, t)
            weights = self._weights(y, length)
            samples.append(_Sample(weights, by_first * self.spatial_scale, by_last * self.spatial_scale))
        return samples

    def _weights(self, y: float, length: int) -> list[tuple[int, float, float]]:
        minus = 1.0 if self.absolute else -1.0
        if y < -1 or y > length:
            return []
        if y < 0 or y >= length - 1:
            return [(0 if y < 0 else length - 1, 1.0, 0.0)]
        cell = math.floor(y)
        return [(cell, 1 - (y - cell), minus), (cell + 1, y - cell, 1.0)]


@dataclass(frozen=True)
class _Sample:
    """Pixel, weight and slope of the weight along one axis, and how the position moves with both corners."""

    weights: list[tuple[int, float, float]]
    by_first: float
    by_last: float


@dataclass(frozen=True)
class RoIPool:
    """The geometry of RoIPool and, with ``position_sensitive``, of PSRoIPool: mean instead of largest pixel.

    ``kind`` is what corners are computed in.
    """

    output_size: Pair
    spatial_scale: float
    position_sensitive: bool = False
    kind: type[np.floating] = np.float64

    def __call__(self, image: Array, rois: Array, grad: Array) -> dict[str, Array]:
        """``output`` and, under grad_output, ``grad:input``."""
        out, d_image = np.zeros(grad.shape), np.zeros(image.shape)
        for r, (n, *corners) in enumerate(rois):
            if not np.isfinite(corners).all():
                continue
            for (py, px), c in itertools.product(np.ndindex(*self.output_size), range(grad.shape[1])):
                plane = (c * self.output_size[0] + py) * self.output_size[1] + px
                plane = plane if self.position_sensitive else c
                rows = self._pixels(corners[1], corners[3], py, self.output_size[0], image.shape[2])
                columns = self._pixels(corners[0], corners[2], px, self.output_size[1], image.shape[3])
                pixels = list(itertools.product(rows, columns))
                if not pixels:
                    continue
                chosen = pixels if self.position_sensitive else [self._largest(image[int(n), plane], pixels)]
                for pixel in chosen:
                    out[r, c, py, px] += image[(int(n), plane, *pixel)] / len(chosen)
                    d_image[(int(n), plane, *pixel)] += grad[r, c, py, px] / len(chosen)
        return {"output": out, "grad:input": d_image}

    def _pixels(self, first: float, last: float, number: int, bins: int, length: int) -> list[int]:
        """Those pixels of the image whose whole bin, with exact fractions, is the one of that number."""
        start, end = (self._rounded(corner) for corner in (first, last))
        size = max(end - start + (not self.position_sensitive), 1)
        low, high = Fraction(number * size, bins), Fraction((number + 1) * size, bins)
        return [pixel for pixel in range(length) if low - 1 < pixel - start < high]

    def _rounded(self, corner: float) -> int:
        value = Fraction(float(self.kind(corner) * self.kind(self.spatial_scale)))
        away = math.floor(abs(value) + Fraction(1, 2))
        return min(away, 2**30) * (-1 if value < 0 else 1)

    @staticmethod
    def _largest(plane: Array, pixels: list[Pair]) -> Pair:
        best = pixels[0]
        for pixel in pixels:
            if plane[pixel] > plane[best] or (np.isnan(plane[pixel]) and not np.isnan(plane[best])):
                best = pixel
        return best
