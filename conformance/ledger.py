"""The ledger: what is known to diverge, and why. See `divergences.toml`."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from cases.case import Case, write_value
from cases.operator import parse_case

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEDGER = Path(__file__).parent / "divergences.toml"
KINDS = ("convention", "defect", "crash")

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Entry:
    """One known divergence.

    ``operator`` and ``quantity`` are shell patterns; ``condition`` maps an axis to the values (as ids write them)
    or to a comparison such as "> 32"; ``case`` is the smallest case that shows it, and is part of every run.
    """

    id: str
    provider: str
    versions: str
    operator: str
    quantity: str
    kind: str
    reason: str
    link: str
    case: str
    condition: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def concerns(self, provider: str, version: str) -> bool:
        """Whether the entry is about this version of this provider."""
        if provider != self.provider:
            return False
        try:
            number = Version(version.split()[0])
        except (InvalidVersion, IndexError):
            return False
        return SpecifierSet(self.versions).contains(number, prereleases=True)

    def covers(self, case: Case, quantity: str) -> bool:
        """Whether the entry is about this quantity of this case."""
        return (
            fnmatchcase(case.operator, self.operator)
            and fnmatchcase(quantity, self.quantity)
            and all(_holds(case, axis, allowed) for axis, allowed in self.condition)
        )


class Ledger:
    """All entries, looked up by what was compared."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)

    def find(
        self, provider: str, version: str, case: Case, quantity: str, kinds: Collection[str] = KINDS
    ) -> Entry | None:
        """The first entry of one of the kinds that knows of a divergence of this quantity; None if there is none."""
        return next(
            (
                entry
                for entry in self.entries
                if entry.kind in kinds and entry.concerns(provider, version) and entry.covers(case, quantity)
            ),
            None,
        )

    def cases(self, implementations: Iterable[tuple[str, str]]) -> list[Case]:
        """The smallest cases of the entries that concern one of the given (implementation, version) pairs."""
        pairs = list(implementations)
        return [
            parse_case(entry.case) for entry in self.entries if any(entry.concerns(*pair) for pair in pairs)
        ]

    def stale(
        self, asked: Iterable[tuple[str, str, str, str]], hit: Collection[tuple[str, str, str]]
    ) -> list[tuple[Entry, str]]:
        """The entries whose own case was asked of an implementation that they concern, and does not diverge.

        ``asked`` are the (implementation, version, case id, quantity) that were compared, ``hit`` the (entry id,
        version, case id) on which a divergence was booked. With each entry comes the version.
        """
        pairs = (
            (entry, version)
            for entry in self.entries
            for implementation, version, case, quantity in sorted(asked)
            if case == entry.case
            and fnmatchcase(quantity, entry.quantity)
            and entry.concerns(implementation, version)
            and (entry.id, version, case) not in hit
        )
        return list(dict.fromkeys(pairs))


def read(paths: Sequence[Path] = (LEDGER,)) -> Ledger:
    """The ledger of these TOML files.

    Raises ValueError naming file and entry when a key is missing, unknown, empty, or does not parse.
    """
    entries: list[Entry] = []
    for path in paths:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"ledger {path}: {error}") from error
        rows = content.pop("divergence", [])
        if content:
            raise ValueError(f"ledger {path}: unknown key {sorted(content)[0]!r}, expected divergence")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"ledger {path}: 'divergence' must be tables, [[divergence]]")
        entries += [_entry(path, row) for row in rows]
    ids = [entry.id for entry in entries]
    if repeated := {entry_id for entry_id in ids if ids.count(entry_id) > 1}:
        raise ValueError(f"ledger: the id {sorted(repeated)[0]!r} stands twice")
    return Ledger(entries)


def _entry(path: Path, row: dict[str, Any]) -> Entry:
    where = f"ledger {path}, entry {row.get('id', '(without id)')!r}"
    names = {field.name for field in fields(Entry)}
    if unknown := set(row) - names:
        raise ValueError(f"{where}: unknown key {sorted(unknown)[0]!r}, expected {', '.join(sorted(names))}")
    for name in sorted(names - {"condition"}):
        if not isinstance(row.get(name), str) or not (row[name].strip() or name == "link"):
            raise ValueError(f"{where}: {name!r} must be a string that is not empty")
    if row["kind"] not in KINDS:
        raise ValueError(f"{where}: kind is {row['kind']!r}, expected one of {', '.join(KINDS)}")
    try:
        SpecifierSet(row["versions"])
        case = parse_case(row["case"])
    except (InvalidSpecifier, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    condition = row.get("condition", {})
    if not isinstance(condition, dict):
        raise ValueError(f"{where}: condition must be a table from axes to values")
    condition = {axis: (values,) if isinstance(values, str) else values for axis, values in condition.items()}
    for axis, values in condition.items():
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{where}: condition: {axis!r} must be a string or a list of strings")
    entry = Entry(
        **{**row, "condition": tuple(sorted((axis, tuple(values)) for axis, values in condition.items()))}
    )
    if not fnmatchcase(case.operator, entry.operator) or not all(
        _holds(case, axis, allowed) for axis, allowed in entry.condition
    ):
        raise ValueError(f"{where}: its own case {case.id} does not meet its condition")
    return entry


def _holds(case: Case, axis: str, allowed: tuple[str, ...]) -> bool:
    if not hasattr(case, axis):
        return False
    value = getattr(case, axis)
    return any(_fits(value, text) for text in allowed)


def _fits(value: Any, text: str) -> bool:
    if comparison := re.fullmatch(r"(<=|>=|<|>)\s*(-?\d+)", text):
        return isinstance(value, int) and bool(_COMPARISONS[comparison[1]](value, int(comparison[2])))
    return write_value(value) == text
