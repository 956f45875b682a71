"""The tested dtypes and the precision that each one is accumulated in."""

from __future__ import annotations

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The op-math dtype: float32 for 16-bit floats, otherwise the dtype itself."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2
