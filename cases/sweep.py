"""Which cases a tier runs: covering arrays over the axes of each operator, one for each boundary class.

In every array each pair of axis values (each triple, nightly) that can occur together does occur.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from allpairspy import AllPairs

from cases.case import Case, Value
from cases.operator import Operator, all_operators

TIERS = ("smoke", "default", "nightly")

# How many axis values a covering array must combine.
_STRENGTH = {"smoke": 2, "default": 2, "nightly": 3}


def devices() -> list[str]:
    """The devices present here, CPU first."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", accelerator.type] if accelerator else ["cpu"]


def sweep(tier: str) -> list[Case]:
    """The cases of a tier, in a fixed order, without repetitions.

    Raises ValueError when there is no such tier.
    """
    if tier not in TIERS:
        raise ValueError(f"tier: got {tier!r}, expected one of {', '.join(TIERS)}")
    cases: dict[Case, None] = {}
    for operator in all_operators().values():
        cases.update(dict.fromkeys(_operator_cases(operator, tier)))
    return list(cases)


def _operator_cases(operator: Operator[Any], tier: str) -> Iterator[Case]:
    axes = {**(operator.smoke_axes if tier == "smoke" else operator.axes), "device": devices()}
    boundaries = operator.axes[operator.boundary_axis]
    if tier == "smoke":
        yield from covering_array(operator, {operator.boundary_axis: boundaries, **axes}, _STRENGTH[tier])
        return
    for boundary in boundaries:
        yield from covering_array(operator, {**axes, operator.boundary_axis: (boundary,)}, _STRENGTH[tier])


def covering_array(
    operator: Operator[Any], axes: Mapping[str, Sequence[Value]], strength: int
) -> list[Case]:
    """Cases in which all combinations of ``strength`` axis values appear that a valid case can have."""
    fixed = {name: values[0] for name, values in axes.items() if len(values) == 1}
    varying = {name: values for name, values in axes.items() if len(values) > 1}
    names = list(varying)

    def possible(row: Sequence[Value]) -> bool:
        known = names[: len(row)]
        case = operator.case_type(**fixed, **dict(zip(known, row, strict=True)))
        return not operator.why_invalid(case, {*fixed, *known})

    rows = AllPairs(list(varying.values()), filter_func=possible, n=strength)
    return [operator.case_type(**fixed, **dict(zip(names, row, strict=True))) for row in rows]


def uncovered_pairs(cases: Sequence[Case], axes: Mapping[str, Sequence[Value]]) -> list[tuple[str, ...]]:
    """The pairs of axis values that none of the cases has, written NAME=VALUE."""
    missing = []
    for (first, firsts), (second, seconds) in itertools.combinations(axes.items(), 2):
        seen = {(getattr(case, first), getattr(case, second)) for case in cases}
        missing += [
            (f"{first}={a}", f"{second}={b}")
            for a, b in itertools.product(firsts, seconds)
            if (a, b) not in seen
        ]
    return missing
