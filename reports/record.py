"""A Record: one comparison of one quantity of one provider on one case."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


class Status(str, enum.Enum):
    """What a comparison came to. An absent or refusing provider is never a match."""

    MATCH = "match"
    CONVENTION = "convention"
    KNOWN = "known"
    DEFECT = "defect"
    DRIFT = "drift"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    VACUOUS = "vacuous"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Element:
    """One element of a compared tensor: where it is, what it should be, what came.

    ``samples`` lists the sampling positions that feed the element, as (y, x, coordinate class).
    """

    index: tuple[int, ...]
    expected: float
    got: float
    err_over_bound: float
    samples: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True)
class Record:
    """One row of a run's table.

    ``err_over_bound`` is the largest error of any element over its derived bound (1 is the limit; NaN when
    nothing was compared), ``max_abs_error`` is in the result's units, ``max_ulp_error`` in units of the last
    place of the result's dtype, ``tested`` counts the elements whose bound is not zero, ``seconds`` is
    the provider's own time.
    """

    case: str
    operator: str
    provider: str
    version: str
    device: str
    dtype: str
    boundary: str
    question: str
    quantity: str
    status: Status
    convention: str = ""
    err_over_bound: float = math.nan
    rms_over_bound: float = math.nan
    max_abs_error: float = math.nan
    max_ulp_error: float = math.nan
    elements: int = 0
    tested: int = 0
    worst: tuple[Element, ...] = field(default=())
    message: str = ""
    ledger: str = ""
    seconds: float = math.nan

    def to_json(self) -> str:
        """The record as one line of JSON (NaN and infinities as JSON's Python extension writes them)."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record that `to_json` wrote. Raises ValueError on anything else."""
        row: dict[str, Any] = json.loads(line)
        try:
            row["status"] = Status(row["status"])
            row["worst"] = tuple(
                Element(
                    tuple(worst["index"]),
                    worst["expected"],
                    worst["got"],
                    worst["err_over_bound"],
                    tuple((y, x, name) for y, x, name in worst["samples"]),
                )
                for worst in row["worst"]
            )
            return cls(**row)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record: {error}: {line[:200]}") from error
