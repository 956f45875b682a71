"""The values that tensors are filled with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cases.case import Case
from cases.dtypes import DTYPES

DATA_SETS = ("real", "integer")


def draw(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Values of the case's data set in its dtype: reals in (-1, 1), or multiples of 1/2 up to 2."""
    values = random.uniform(-1, 1, shape) if case.data == "real" else random.integers(-4, 5, shape) / 2
    return torch.as_tensor(values).to(DTYPES[case.dtype])
