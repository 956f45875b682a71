"""The tiers cover what they promise, and no case of theirs is empty by accident."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cases.case import Case, Value, write_value
from cases.operator import COMMON, Constraint, Operator, all_operators
from cases.sweep import devices, sweep, uncovered_pairs
from conformance.expectation import Expectation

OPERATORS = all_operators()

cases_of = functools.cache(sweep)


def _why_not_swept(case: Case) -> str:
    return "what may kill a process is asked of the CPU only" if case.device != "cpu" and case.hostile else ""


def feasible(
    operator: Operator[Any], axes: Mapping[str, Sequence[Value]], fixed: Mapping[str, Value]
) -> bool:
    """Whether a valid case has the fixed values and, on the other axes, some of the given ones."""
    swept = Constraint(("device", operator.boundary_axis, "dtype", "layout"), _why_not_swept)
    constraints = (*COMMON, *operator.constraints(), swept)
    # Only axes that a chain of constraints ties to the fixed ones matter; the nearest are decided first.
    tied = [axis for axis in reversed(list(fixed)) if axis != operator.boundary_axis]
    for axis in tied:
        tied += [a for each in constraints if axis in each.axes for a in each.axes if a not in tied]
    names = [*fixed, *(axis for axis in dict.fromkeys(tied) if axis in axes and axis not in fixed)]

    def search(chosen: dict[str, Value]) -> bool:
        case = operator.case_type(**chosen)
        decided = (
            each for each in constraints if all(axis in chosen or axis not in axes for axis in each.axes)
        )
        if any(each.why(case) for each in decided):
            return False
        if len(chosen) == len(names):
            return True
        name = names[len(chosen)]
        return any(search({**chosen, name: value}) for value in axes[name])

    return search(dict(fixed))


def missing_pairs(
    operator: Operator[Any],
    cases: Sequence[Case],
    axes: Mapping[str, Sequence[Value]],
    fixed: Mapping[str, Value],
) -> list[tuple[str, str]]:
    """The pairs that no case has, although a valid one could."""
    values = {(name, write_value(value)): value for name, of in axes.items() for value in of}
    missing = []
    for pair in uncovered_pairs(cases, {name: list(map(write_value, of)) for name, of in axes.items()}):
        chosen = {name: values[name, text] for name, _, text in (side.partition("=") for side in pair)}
        if feasible(
            operator, {**axes, **{name: (value,) for name, value in fixed.items()}}, {**fixed, **chosen}
        ):
            missing.append(pair)
    return missing


class Written:
    """A case whose axes read as ids write them: True is not 1, and (1, 1) is text."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __getattr__(self, name: str) -> str:
        return write_value(getattr(self._case, name))


def written(cases: Sequence[Case]) -> list[Any]:
    return list(map(Written, cases))


def is_void(operator: Operator[Any], case: Case) -> bool:
    return any(getattr(case, axis) == value for axis, value in operator.void.items())


@pytest.mark.parametrize("present", [["cpu"], ["cpu", "cuda"]], ids=["cpu", "cuda"])
def test_smoke_covers_every_possible_pair(present: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cases.sweep.devices", lambda: present)
    swept = sweep("smoke")
    for name, operator in OPERATORS.items():
        boundaries = operator.axes[operator.boundary_axis]
        axes = {**operator.smoke_axes, operator.boundary_axis: boundaries, "device": present}
        cases = [case for case in swept if case.operator == name and not is_void(operator, case)]
        assert not missing_pairs(operator, written(cases), axes, {})
        assert missing_pairs(operator, written(cases[: len(cases) // 2]), axes, {})


@pytest.mark.parametrize("name", OPERATORS)
def test_default_covers_every_possible_pair_in_every_boundary_class(name: str) -> None:
    operator = OPERATORS[name]
    others = {axis: values for axis, values in operator.axes.items() if axis != operator.boundary_axis}
    others["device"] = devices()
    for boundary in operator.axes[operator.boundary_axis]:
        cases = [
            case
            for case in cases_of("default")
            if case.operator == name and case.boundary == boundary and not is_void(operator, case)
        ]
        assert not missing_pairs(operator, written(cases), others, {operator.boundary_axis: boundary})


def test_uncovered_pairs_names_what_is_missing() -> None:
    case_type = OPERATORS["deform_conv2d"].case_type
    cases = [case_type(batch=1, groups=1), case_type(batch=2, groups=2)]
    axes = {"batch": (1, 2), "groups": (1, 2)}
    assert uncovered_pairs(cases, axes) == [("batch=1", "groups=2"), ("batch=2", "groups=1")]


def test_tiers_are_as_large_as_promised() -> None:
    assert len(cases_of("smoke")) < 500
    assert len(cases_of("default")) > 400
    assert {case.operator for case in cases_of("smoke")} == set(OPERATORS)
    with pytest.raises(ValueError, match="tier: got 'weekly', expected one of smoke, default, nightly"):
        sweep("weekly")


@pytest.mark.parametrize("tier", ["smoke", "default"])
def test_every_case_is_valid_and_stands_once(tier: str) -> None:
    cases = cases_of(tier)
    assert len(set(cases)) == len(cases)
    assert [case.id for case in cases if not OPERATORS[case.operator].valid(case)] == []
    assert tier != "smoke" or sweep(tier) == cases


def test_every_operator_has_a_few_void_cases_only() -> None:
    for tier in ("smoke", "default"):
        for name, operator in OPERATORS.items():
            of_operator = [case for case in cases_of(tier) if case.operator == name]
            void = [case for case in of_operator if is_void(operator, case)]
            assert void
            assert len(void) < len(of_operator) / 3


def test_every_case_of_the_smoke_tier_tests_something() -> None:
    empty = []
    for case in cases_of("smoke"):
        expectation = Expectation(case)
        if is_void(expectation.operator, case):
            continue
        convention = expectation.operator.conventions[0]
        expected = {**expectation.output(convention), **expectation.gradients(convention)}
        if not any(bool((each.majorant > 0).any()) for each in expected.values()):
            empty.append(case.id)
        for each in expected.values():
            assert bool((each.majorant >= each.value.nan_to_num(1).abs() * (1 - 1e-12)).all())
            assert bool(each.majorant.isfinite().all())
    assert empty == []
