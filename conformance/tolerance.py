"""How far a result may be from the oracle: a bound derived from the case, never a tuned constant.

|got - expected| <= k*u*majorant + u_result*|expected|, with u the unit roundoff of the accumulation dtype,
u_result that of the result's dtype where it is coarser, k the roundings on the longest path and majorant the
sum of the absolute values of all terms (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).
Where the majorant is zero the result must be exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cases.dtypes import accumulation_dtype, unit_roundoff

# The largest over the tested elements of a root mean square may exceed sqrt(k) by this factor: for independent
# roundings its expectation is below 1 (Higham and Mary 2019, SIAM J. Sci. Comput. 41), and 2 is four times that
# in the squares, of which at least MINIMUM_FOR_RMS are averaged.
RMS_FACTOR = 2.0
MINIMUM_FOR_RMS = 32


@dataclass(frozen=True)
class Expected:
    """What one quantity should be, in float64, and what its bound is made of.

    ``exact`` says that every sum of the case is exact in the accumulation dtype: then only the one rounding of the
    result's dtype is left, and the comparison is bit for bit.
    """

    value: Tensor
    majorant: Tensor
    roundings: int
    exact: bool = False


def bound(expected: Expected, dtype: torch.dtype) -> Tensor:
    """The largest allowed error of each element, in float64, for a result of ``dtype``."""
    wide = accumulation_dtype(dtype)
    limit = expected.roundings * unit_roundoff(wide) * expected.majorant
    limit = limit + (expected.majorant > 0) * torch.finfo(wide).smallest_normal * torch.finfo(wide).eps
    if dtype != wide:
        info = torch.finfo(dtype)
        largest = expected.value.abs() + limit
        result_rounding = torch.maximum(
            unit_roundoff(dtype) * largest, torch.tensor(info.smallest_normal * info.eps, dtype=torch.float64)
        )
        limit = limit + (expected.majorant > 0) * result_rounding
    return limit


def rms_limit(roundings: int) -> float:
    """The largest allowed root mean square of error / (u*majorant)."""
    return RMS_FACTOR * math.sqrt(roundings)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of ``dtype`` at each value, in float64; zero counts as 1/2."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().double())
    spacing = torch.ldexp(torch.full_like(values, info.eps, dtype=torch.float64), exponent - 1)
    return spacing.clamp(min=info.smallest_normal * info.eps)
