"""The values that tensors are filled with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.dtypes import DTYPES

# The third is that of pytorch/vision#6885, which can be followed by hand.
DATA_SETS = ("real", "integer", "ramp", "negative")


def draw(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values of the case's data set in its dtype.

    ``real`` draws from (-1, 1), ``integer`` multiples of 1/2 up to 2. ``ramp`` is 1, 2, 3, ... along every row of
    pixels of an image, and ones elsewhere. ``negative`` is an image far below zero, and as ``real`` elsewhere.
    """
    if case.data == "ramp":
        values = np.ones(shape)
    elif case.data == "integer":
        values = random.integers(-4, 5, shape) / 2
    else:
        values = random.uniform(-1, 1, shape)
    return torch.as_tensor(values).to(DTYPES[case.dtype])


def draw_image(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """The values of an image (N, C, H, W): sums of ``ramp``, and of ``negative`` from (-30000, -20000)."""
    if case.data == "negative":
        return torch.as_tensor(random.uniform(-30000, -20000, shape)).to(DTYPES[case.dtype])
    image = draw(case, random, shape)
    return image.cumsum(-1).to(image.dtype) if case.data == "ramp" else image
