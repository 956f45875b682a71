"""What an operator file says: its axes, its sampler, its float64 oracle and its roundings.

The oracle is one differentiable forward, evaluated in two arithmetics. SIGNED gives the expected value.
MAJORANT gives the sum of the absolute values of all terms: every tensor is made absolute, every subtraction
counts as an addition, and so does every minus sign of a derivative. Because the derivative of a polynomial
with positive coefficients has positive coefficients again, autograd through the majorant bounds the terms of
the gradients, of any order, by the very code that defines the value.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from cases.case import Case, Value, parse_axes, write_value
from cases.coordinates import SMOOTH
from cases.data import DATA_SETS
from cases.dtypes import DTYPES

C = TypeVar("C", bound=Case)
Tensors = dict[str, Tensor]


class Arithmetic(enum.Enum):
    """How the oracle counts: with signs, or with the absolute value of every term."""

    SIGNED = "signed"
    MAJORANT = "majorant"

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor as this arithmetic reads it; in the majorant absolute, with slope +1 even at 0."""
        if self is Arithmetic.SIGNED:
            return tensor
        return with_slope_of(tensor.abs(), tensor)

    def one_minus(self, fraction: Tensor) -> Tensor:
        """``1 - fraction``, whose slope counts as +1 in the majorant."""
        complement = 1 - fraction
        if self is Arithmetic.SIGNED:
            return complement
        return with_slope_of(complement, fraction)


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def with_slope_of(value: Tensor, source: Tensor) -> Tensor:
    """``value``, through which autograd sees ``source`` (of the same shape) instead, whatever that holds."""
    seen: Tensor = _Seen.apply(value.detach(), source)
    return seen


@dataclass(frozen=True)
class Location:
    """One sampling position that feeds an element: coordinates in pixels and the classes of both."""

    y: float
    x: float
    boundary: str


@dataclass(frozen=True)
class Cut:
    """Pieces of some tensors, each along a dimension of its own, give the output in pieces along ``output``."""

    tensors: Mapping[str, int]
    output: int


@dataclass(frozen=True)
class Constraint(Generic[C]):
    """Which combinations of some axes are defined: ``why`` says why not, and is empty when they are."""

    axes: tuple[str, ...]
    why: Callable[[C], str]


def one_of(axis: str, values: Sequence[str]) -> Constraint[Any]:
    """The constraint that an axis has one of the values."""

    def why(case: Case) -> str:
        value = getattr(case, axis)
        return "" if value in values else f"{axis} is {value!r}, expected one of {', '.join(values)}"

    return Constraint((axis,), why)


def at_least(axis: str, smallest: int) -> Constraint[Any]:
    """The constraint that an axis, or both of its numbers, is no smaller."""

    def why(case: Case) -> str:
        value = getattr(case, axis)
        lowest = min(value) if isinstance(value, tuple) else value
        return "" if lowest >= smallest else f"{axis} is {write_value(value)}, expected at least {smallest}"

    return Constraint((axis,), why)


def _why_no_float64(case: Case) -> str:
    return "mps has no float64" if case.device == "mps" and case.dtype == "float64" else ""


COMMON = (
    one_of("dtype", tuple(DTYPES)),
    one_of("data", DATA_SETS),
    Constraint(("device", "dtype"), _why_no_float64),
)


class Operator(Generic[C]):
    """One operator. A file in `cases/operators/` defines a subclass and an instance called OPERATOR."""

    name: ClassVar[str]
    case_type: type[C]
    axes: ClassVar[Mapping[str, Sequence[Value]]]
    smoke_axes: ClassVar[Mapping[str, Sequence[Value]]]
    boundary_axis: ClassVar[str] = "offsets"
    # Values with which nothing is computed; a few cases have them, not every second one.
    void: ClassVar[Mapping[str, Value]]
    # Small float64 cases for gradcheck and gradgradcheck, in every tier.
    finite_difference_axes: ClassVar[Mapping[str, Sequence[Value]]]
    # Cases large enough that a kernel splits them into tiles and threads, in every tier.
    large_axes: ClassVar[Mapping[str, Sequence[Value]]]
    # Cases whose sums are so long that a library may split them by the number of threads, in every tier.
    long_axes: ClassVar[Mapping[str, Sequence[Value]]] = {}
    is_module: ClassVar[bool] = False
    # Whether smoke puts questions that take seconds to this operator, for the others that are made alike.
    leads_family: ClassVar[bool] = False
    # Tensors that a case may lack, and that an implementation is then given as None.
    optional: ClassVar[tuple[str, ...]] = ()
    # The first is the documented meaning, the others are variants that a provider may follow.
    conventions: ClassVar[tuple[str, ...]] = ("open",)

    def parse(self, axes: str) -> C:
        """The case whose id is ``NAME/axes``. Raises ValueError when the text is not such an id."""
        case = parse_axes(self.case_type, axes)
        if reason := self.why_invalid(case):
            raise ValueError(f"case id {case.id}: {reason}")
        return case

    def constraints(self) -> Sequence[Constraint[C]]:
        """What makes a case valid, beyond each axis' own values."""
        raise NotImplementedError

    def why_invalid(self, case: C) -> str:
        """Why the operator is not defined on these axes; empty when it is."""
        reasons = (constraint.why(case) for constraint in (*COMMON, *self.constraints()))
        return next(filter(None, reasons), "")

    def sample(self, case: C) -> Tensors:
        """The tensors of the case, drawn in the dtype under test, laid out as the case says."""
        raise NotImplementedError

    def cotangent(self, case: C, output: Tensor) -> Tensor:
        """The grad_output of the case: never constant, laid out as the case says."""
        raise NotImplementedError

    def differentiable(self, case: C) -> tuple[str, ...]:
        """The names of the tensors that have a gradient."""
        raise NotImplementedError

    def arguments(self, case: C) -> dict[str, Any]:
        """What an implementation is given besides the tensors, under `Operators`' argument names."""
        raise NotImplementedError

    def oracle(self, case: C, tensors: Tensors, arithmetic: Arithmetic, convention: str) -> Tensor:
        """The output in float64 from float64 tensors, twice differentiable."""
        raise NotImplementedError

    def roundings(self, case: C, tensors: Tensors) -> dict[str, int]:
        """Roundings on the longest path to one element, for `output` and each `grad:` quantity."""
        raise NotImplementedError

    def quantum(self, case: C) -> float:
        """A power of two of which every term of every quantity is a multiple; 0 when there is none."""
        return 0.0

    def locate(
        self, case: C, tensors: Tensors, quantity: str, index: tuple[int, ...]
    ) -> tuple[Location, ...]:
        """The sampling positions behind one element of a quantity; empty when there are too many."""
        raise NotImplementedError

    def smooth(self, case: C) -> bool:
        """Whether the case keeps so clear of every kink that finite differences exist."""
        return case.boundary in SMOOTH

    def pin(self, tensors: Tensors) -> Tensors:
        """The tensors with what is no real number in them, such as a batch index, out of a gradient's reach."""
        return tensors

    def cuts(self, case: C) -> dict[str, Cut]:
        """The ways to cut the work in pieces, by what is cut; none for a module."""
        return {}

    def image_alone(self, case: C, tensors: Tensors, image: int) -> tuple[Tensors, list[int]]:
        """The tensors of one image of the batch, and which rows of the output are its."""
        raise NotImplementedError

    def larger(self, case: C) -> C:
        """The same case with another number of images, of another size."""
        height, width = case.size  # type: ignore[attr-defined]
        changes: dict[str, Any] = {"batch": case.batch + 1, "size": (height + 1, width + 2)}  # type: ignore[attr-defined]
        return replace(case, **changes)

    def valid(self, case: Case) -> bool:
        """Whether the case is one of this operator's and defined."""
        return isinstance(case, self.case_type) and not self.why_invalid(case)


def all_operators() -> dict[str, Operator[Any]]:
    """Every operator in `cases/operators/`, by name."""
    import cases.operators as package

    modules = [
        importlib.import_module(f"cases.operators.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]
    operators = [module.OPERATOR for module in modules if hasattr(module, "OPERATOR")]
    return {operator.name: operator for operator in operators}


def parse_case(case_id: str) -> Case:
    """The case with that id. Raises ValueError when there is no such operator, axis or value."""
    name, separator, axes = case_id.partition("/")
    operators = all_operators()
    if not separator or name not in operators:
        raise ValueError(
            f"case id: got {case_id!r}, expected OPERATOR/AXES with one of {', '.join(operators)}"
        )
    case: Case = operators[name].parse(axes)
    return case
