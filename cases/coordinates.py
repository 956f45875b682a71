"""Where samples fall along one axis of length L, and how to hit each class on purpose.

Classes of a coordinate y (semantics of Dai et al. 2017 and Zhu et al. 2019, as torchvision and mmcv
compute it; the edge below the first pixel is pytorch/vision#6885):

interior        0 < y < L - 1, not an integer          integer     y in 0 ... L - 2
last_pixel      y == L - 1                             rim         -1 < y < 0 or L - 1 < y < L
edge_low        y == -1                                edge_high   y == L
outside         y < -1 or y > L                        non_finite  NaN, infinities
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cases.dtypes import accumulation_dtype

CLASSES = ("interior", "integer", "last_pixel", "rim", "edge_low", "edge_high", "outside", "non_finite")

# Targets that lie beside a kink; "ulp" is the nearest coordinate that the dtype can hold, "nano" is 1e-9.
NEIGHBOURS = tuple(
    f"{side}_{distance}"
    for distance in ("ulp", "nano")
    for side in ("below_integer", "above_integer", "inside_edge", "outside_edge")
)

# "zero" is a freshly initialised layer (all offsets 0), "mixed" draws a class for each sample.
BOUNDARIES = (*CLASSES, *NEIGHBOURS, "zero", "mixed")

# Classes in which a sample contributes nothing.
VOIDING = ("edge_low", "edge_high", "outside", "outside_edge_ulp", "outside_edge_nano", "non_finite")

# No finite-difference check can cross one of these.
SMOOTH = ("interior", "rim", "outside")

Array = np.ndarray


def classify(y: Array, length: int) -> Array:
    """The class name of each coordinate along an axis of ``length`` pixels."""
    with np.errstate(invalid="ignore"):
        whole = y == np.floor(y)
        conditions = [
            ~np.isfinite(y),
            y == -1,
            y == length,
            (y < -1) | (y > length),
            (y < 0) | (y > length - 1),
            y == length - 1,
            whole,
        ]
    names = ["non_finite", "edge_low", "edge_high", "outside", "rim", "last_pixel", "integer"]
    classes: Array = np.select(conditions, names, default="interior")
    return classes


def possible(boundary: str, length: int) -> bool:
    """Whether an axis of ``length`` pixels has coordinates of that class."""
    return length >= 2 or boundary not in ("interior", "integer")


def sample_coordinates(
    boundary: str,
    length: int,
    base: Array,
    dtype: torch.dtype,
    random: np.random.Generator,
    *,
    quarters: bool = False,
) -> Array:
    """Offsets (float64, exact in ``dtype``) that bring ``base`` into the class ``boundary``, one for each.

    With ``quarters``, coordinates between two pixels are multiples of 1/4.
    """
    shape = base.shape
    low = random.random(shape) < 0.5
    fraction = random.integers(1, 4, shape) / 4 if quarters else random.uniform(0.1, 0.9, shape)
    if boundary == "zero":
        return np.zeros(shape)
    if boundary == "mixed":
        names = [name for name in CLASSES[:-1] if possible(name, length)]
        choice = random.integers(len(names), size=shape)
        offsets = [sample_coordinates(name, length, base, dtype, random, quarters=quarters) for name in names]
        mixed: Array = np.choose(choice, offsets)
        return mixed
    if boundary == "non_finite":
        return np.asarray(random.choice([np.nan, np.inf, -np.inf], shape))
    if boundary == "interior":
        return _round(random.integers(0, length - 1, shape) + fraction - base, dtype)
    if boundary == "integer":
        return _round(random.integers(0, length - 1, shape) - base, dtype)
    if boundary == "last_pixel":
        return length - 1 - base
    if boundary == "rim":
        return _round(np.where(low, -fraction, length - 1 + fraction) - base, dtype)
    if boundary == "edge_low":
        return -1 - base
    if boundary == "edge_high":
        return length - base
    if boundary == "outside":
        distance = random.choice([0.5, 3.25, 1000.0, 30000.0], shape) + fraction
        return _round(np.where(low, -1 - distance, length + distance) - base, dtype)
    side, _, distance_name = boundary.rpartition("_")
    if side in ("below_integer", "above_integer"):
        kink = random.integers(0, length, shape).astype(float)
        sign = np.full(shape, -1.0 if side == "below_integer" else 1.0)
    elif side in ("inside_edge", "outside_edge"):
        kink = np.where(low, -1.0, float(length))
        sign = np.where(low, 1.0, -1.0) * (1.0 if side == "inside_edge" else -1.0)
    else:
        raise ValueError(f"boundary: got {boundary!r}, expected one of {', '.join(BOUNDARIES)}")
    if distance_name == "nano":
        return _round(kink - base + sign * 1e-9, dtype)
    return _next_to(kink, sign, base, dtype)


def add_rounded(base: Array, offset: Tensor) -> Tensor:
    """``base + offset`` rounded once to the offset's dtype, as float64: where the sample really falls."""
    wide = accumulation_dtype(offset.dtype)
    return (torch.from_numpy(base.copy()).to(wide) + offset.to(wide)).to(offset.dtype).double()


def _next_to(kink: Array, sign: Array, base: Array, dtype: torch.dtype) -> Array:
    """The offsets nearest to ``kink - base`` for which the rounded coordinate leaves the kink."""
    exact = kink - base
    scale = np.maximum(np.abs(kink), np.abs(exact))
    ulp = torch.finfo(dtype).eps * np.where(scale > 0, 2.0 ** np.floor(np.log2(np.maximum(scale, 1))), 1.0)
    offset: Array = exact
    for steps in (0.5, 1.0, 2.0):
        stuck = add_rounded(base, torch.as_tensor(offset).to(dtype)).numpy() == kink
        offset = np.where(stuck, _round(exact + sign * steps * ulp, dtype), offset)
    return offset


def _round(values: Array, dtype: torch.dtype) -> Array:
    rounded: Array = torch.as_tensor(values).to(dtype).double().numpy()
    return rounded
