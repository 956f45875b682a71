"""The values that tensors are filled with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.dtypes import DTYPES

# The third is that of pytorch/vision#6885, which can be followed by hand.
DATA_SETS = ("real", "integer", "ramp")


def draw(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values of the case's data set in its dtype.

    ``real`` draws from (-1, 1), ``integer`` multiples of 1/2 up to 2. ``ramp`` is 1, 2, 3, ... along every row of
    pixels of an image, and ones elsewhere.
    """
    if case.data == "ramp":
        values = np.ones(shape)
    elif case.data == "integer":
        values = random.integers(-4, 5, shape) / 2
    else:
        values = random.uniform(-1, 1, shape)
    return torch.as_tensor(values).to(DTYPES[case.dtype])


def draw_image(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """The values of an image (N, C, H, W), which `draw` would make flat for ``ramp``."""
    image = draw(case, random, shape)
    return image.cumsum(-1).to(image.dtype) if case.data == "ramp" else image
