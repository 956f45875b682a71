"""A Case: one configuration of one operator. Its id is readable, and parses back to the same Case.

An id is the operator's name and the axes that differ from their defaults, in the order of declaration:
``deform_conv2d/batch=3,padding=1x0,offsets=edge_low,dtype=float64``. Inputs are drawn from the id alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import ClassVar, TypeVar, get_type_hints

import numpy as np

Value = int | float | bool | str | tuple[int, int]
AnyCase = TypeVar("AnyCase", bound="Case")


@dataclass(frozen=True)
class Case:
    """The axes that every operator has; each operator adds its own as further fields, all with defaults."""

    OPERATOR: ClassVar[str] = ""

    dtype: str = "float32"
    device: str = "cpu"
    data: str = "real"

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.OPERATOR

    @property
    def boundary(self) -> str:
        """The class of coordinates that the case aims at (see `cases.coordinates`)."""
        raise NotImplementedError

    @property
    def hostile(self) -> bool:
        """Whether released kernels are known to kill the process on such a case."""
        return self.boundary == "non_finite"

    @property
    def id(self) -> str:
        """The readable name from which `parse` makes the same case again."""
        axes = [
            f"{axis.name}={write_value(value)}"
            for axis in dataclasses.fields(self)
            if (value := getattr(self, axis.name)) != axis.default
        ]
        return f"{self.OPERATOR}/{','.join(axes) or 'default'}"

    def __str__(self) -> str:
        return self.id

    def generator(self, stream: str = "inputs") -> np.random.Generator:
        """A random generator seeded by the case's id and the name of the stream."""
        digest = hashlib.sha256(f"{self.id} {stream}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def parse_axes(case_type: type[AnyCase], text: str) -> AnyCase:
    """The case whose id is ``OPERATOR/text``.

    Raises ValueError for an unknown axis, a value that does not parse, or an axis named twice.
    """
    types = get_type_hints(case_type)
    axes: dict[str, Value] = {}
    for item in [] if text == "default" else text.split(","):
        name, separator, value = item.partition("=")
        if not separator or name not in {axis.name for axis in dataclasses.fields(case_type)}:
            known = ", ".join(axis.name for axis in dataclasses.fields(case_type))
            raise ValueError(f"case id: {item!r} is not AXIS=VALUE with one of the axes {known}")
        if name in axes:
            raise ValueError(f"case id: axis {name!r} stands twice in {text!r}")
        axes[name] = _read(types[name], value)
    case = case_type(**axes)  # type: ignore[arg-type]
    if case.id != f"{case_type.OPERATOR}/{text}":
        raise ValueError(f"case id: {case_type.OPERATOR}/{text} is written {case.id}")
    return case


def write_value(value: Value) -> str:
    """An axis value as ids write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)


def _read(kind: object, text: str) -> Value:
    try:
        if kind is bool:
            return {"yes": True, "no": False}[text]
        if kind == tuple[int, int]:
            first, second = text.split("x")
            return int(first), int(second)
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
    except (KeyError, ValueError) as error:
        raise ValueError(f"case id: {text!r} is not a value of type {kind}") from error
    return text
