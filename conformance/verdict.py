"""Judging one tensor against what it should be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cases.dtypes import accumulation_dtype, unit_roundoff
from conformance.tolerance import MINIMUM_FOR_RMS, Expected, bound, rms_limit, ulp

WORST_SHOWN = 5


@dataclass(frozen=True)
class WorstElement:
    """An element with one of the largest errors over its bound."""

    index: tuple[int, ...]
    expected: float
    got: float
    err_over_bound: float


@dataclass(frozen=True)
class Verdict:
    """Whether a tensor is right, and by how much it is not. ``fault`` is empty when it is right."""

    fault: str = ""
    err_over_bound: float = math.nan
    rms_over_bound: float = math.nan
    max_abs_error: float = math.nan
    max_ulp_error: float = math.nan
    elements: int = 0
    tested: int = 0
    worst: tuple[WorstElement, ...] = field(default=())


def judge(got: object, expected: Expected, dtype: torch.dtype) -> Verdict:
    """The verdict on a result that should have the expected shape, ``dtype`` and values."""
    elements = expected.value.numel()
    if got is None:
        return Verdict("there is none", elements=elements)
    if not isinstance(got, Tensor):
        return Verdict(f"it is a {type(got).__name__}, expected a tensor", elements=elements)
    if got.shape != expected.value.shape:
        return Verdict(
            f"shape is {tuple(got.shape)}, expected {tuple(expected.value.shape)}", elements=elements
        )
    if got.dtype != dtype:
        return Verdict(f"dtype is {got.dtype}, expected {dtype}", elements=elements)
    if elements == 0:
        return Verdict(err_over_bound=0.0, rms_over_bound=0.0, max_abs_error=0.0, max_ulp_error=0.0)
    return _judge_values(got.detach().cpu().double(), expected, dtype)


def _judge_values(got: Tensor, expected: Expected, dtype: torch.dtype) -> Verdict:
    value = expected.value
    if expected.exact:
        value = value.to(dtype).double()
        limit = torch.zeros_like(value)
    else:
        limit = bound(expected, dtype)
    error = (got - value).abs()
    same = (got == value) | (got.isnan() & value.isnan())
    error = torch.where(same, torch.zeros_like(error), error).nan_to_num(nan=math.inf, posinf=math.inf)
    # Where a NaN is expected, its bound is none either.
    ratio = torch.where(error > 0, error / limit, torch.zeros_like(error)).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    tested = expected.majorant > 0
    rms = _rms(error, expected, dtype) if not expected.exact and dtype == accumulation_dtype(dtype) else 0.0
    highest = float(ratio.max())
    fault = ""
    if highest > 1:
        fault = f"an element is off by {highest:.3g} times its bound"
    elif rms > 1:
        fault = f"the root mean square error is {rms:.3g} times its bound"
    order = ratio.flatten().argsort(descending=True, stable=True)[:WORST_SHOWN]
    worst = tuple(
        WorstElement(
            tuple(int(i) for i in torch.unravel_index(flat, ratio.shape)),
            float(value.flatten()[flat]),
            float(got.flatten()[flat]),
            float(ratio.flatten()[flat]),
        )
        for flat in order
        if ratio.flatten()[flat] > 1
    )
    return Verdict(
        fault,
        highest,
        rms,
        float(error.max()),
        _ulp_error(error, value, dtype),
        value.numel(),
        int(tested.sum()),
        worst,
    )


def _ulp_error(error: Tensor, value: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units in the last place; zeros have no such place, and don't count."""
    ulps = error / ulp(value, dtype)
    return float(torch.where(value != 0, ulps, 0).max())


def _rms(error: Tensor, expected: Expected, dtype: torch.dtype) -> float:
    tested = expected.majorant > 0
    if int(tested.sum()) < MINIMUM_FOR_RMS:
        return 0.0
    scaled = error[tested] / (unit_roundoff(dtype) * expected.majorant[tested])
    return float(scaled.square().mean().sqrt()) / rms_limit(expected.roundings)
