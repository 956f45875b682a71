"""Which cases a tier runs: covering arrays over the axes of each operator, one for each boundary class.

In every array each pair of axis values (each triple, nightly) that can occur together does occur.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import covertable
import torch

from cases.case import Case, Value
from cases.operator import COMMON, Constraint, Operator, all_operators

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
        swept = list(_operator_cases(operator, tier))
        for device in devices():
            on_device = (replace(case, device=device) for case in swept)
            cases.update(dict.fromkeys(filter(operator.valid, on_device)))
    # What may kill a process runs in a forked one, where accelerators don't work.
    return [case for case in cases if case.device == "cpu" or not case.hostile]


def _operator_cases(operator: Operator[Any], tier: str) -> Iterator[Case]:
    axes = dict(operator.smoke_axes if tier == "smoke" else operator.axes)
    boundaries = operator.axes[operator.boundary_axis]
    for axis, value in operator.void.items():
        yield from covering_array(operator, {**operator.smoke_axes, axis: (value,)}, 1)
    yield from covering_array(operator, operator.finite_difference_axes, 2)
    yield from large_cases(operator.name)
    yield from long_cases(operator.name)
    yield from typical_cases(operator.name)
    if tier != "smoke":
        yield from costly_cases(operator.name)
    if tier == "smoke":
        yield from covering_array(operator, {**axes, operator.boundary_axis: boundaries}, _STRENGTH[tier])
        return
    others = {name: values for name, values in axes.items() if name != operator.boundary_axis}
    arrays: dict[str, list[Case]] = {}
    for boundary in boundaries:
        allowed = _allowed_beside(operator, boundary, others)
        # Boundary classes that allow the same values of the other axes share one array.
        if (key := repr(allowed)) not in arrays:
            arrays[key] = covering_array(operator, allowed, _STRENGTH[tier])
        changed: dict[str, Any] = {operator.boundary_axis: boundary}
        yield from (replace(case, **changed) for case in arrays[key])


@functools.cache
def typical_cases(operator_name: str) -> tuple[Case, ...]:
    """Two or three small cases, in every tier, for what torch does around an operator, not where its samples fall."""
    operator = all_operators()[operator_name]
    axes = dict(operator.finite_difference_axes or operator.smoke_axes)
    few = {name: values[:2] for name, values in axes.items()}
    # More than one image, so that there is a batch to be mapped over.
    return tuple(covering_array(operator, {**few, "batch": (2,)}, 1))


def is_typical(case: Case) -> bool:
    """Whether the case is one of these, on whatever device."""
    return replace(case, device="cpu") in typical_cases(case.operator)


def is_one_of_few(case: Case) -> bool:
    """Whether a question that takes seconds is asked: in smoke of one operator of each family, else of all."""
    if is_costly(case):
        return True
    leads = all_operators()[case.operator].leads_family
    return leads and replace(case, device="cpu") in typical_cases(case.operator)[:1]


@functools.cache
def costly_cases(operator_name: str) -> tuple[Case, ...]:
    """The last of the typical cases in float32, not in smoke, for questions that take seconds."""
    return tuple(replace(case, dtype="float32") for case in typical_cases(operator_name)[-1:])


def is_costly(case: Case) -> bool:
    """Whether the case is one of these, on whatever device."""
    return replace(case, device="cpu") in costly_cases(case.operator)


@functools.cache
def large_cases(operator_name: str) -> tuple[Case, ...]:
    """Cases large enough that a kernel splits them into tiles and threads, in every tier."""
    operator = all_operators()[operator_name]
    return tuple(covering_array(operator, operator.large_axes, 1))


@functools.cache
def long_cases(operator_name: str) -> tuple[Case, ...]:
    """Cases with sums so long that a library may split them by the number of threads, in every tier."""
    operator = all_operators()[operator_name]
    return tuple(covering_array(operator, operator.long_axes, 1)) if operator.long_axes else ()


def _allowed_beside(
    operator: Operator[Any], boundary: Value, others: Mapping[str, Sequence[Value]]
) -> dict[str, list[Value]]:
    allowed = {name: list(values) for name, values in others.items()}
    for constraint in operator.constraints():
        if operator.boundary_axis in constraint.axes and len(constraint.axes) == 2:
            (axis,) = set(constraint.axes) - {operator.boundary_axis}
            allowed[axis] = [
                value
                for value in allowed.get(axis, [])
                if not constraint.why(operator.case_type(**{operator.boundary_axis: boundary, axis: value}))
            ]
    return {name: values for name, values in allowed.items() if values}


def covering_array(operator: Operator[Any], axes: Mapping[str, Sequence[Value]], strength: int) -> list[Case]:
    """Cases in which all combinations of ``strength`` axis values appear that a valid case can have."""
    constraints = [
        _as_condition(operator, constraint, axes)
        for constraint in (*COMMON, *operator.constraints())
        if sum(axis in axes for axis in constraint.axes) > 1
    ]
    if not axes:
        return []
    rows = covertable.make(dict(axes), strength=strength, constraints=constraints)
    return [operator.case_type(**row) for row in rows]


def _as_condition(
    operator: Operator[Any], constraint: Constraint[Any], axes: Mapping[str, Sequence[Value]]
) -> dict[str, Any]:
    swept = [axis for axis in constraint.axes if axis in axes]

    def holds(row: Mapping[str, Value]) -> bool:
        return not constraint.why(operator.case_type(**{axis: row[axis] for axis in swept}))

    return {"operator": "fn", "requires": swept, "evaluate": holds}


def uncovered_pairs(cases: Sequence[Case], axes: Mapping[str, Sequence[Value]]) -> list[tuple[str, str]]:
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
