"""The diff report of a run: report.md and index.html, made from records.parquet and run.json alone.

Order: the verdict in a sentence, what ran where, provider by quantity by boundary class, what was not
compared, then every divergence with its worst elements and the command that reruns it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from reports import formats, store, tables
from reports.record import Status

MARKDOWN = "report.md"
HTML = "index.html"
# What keeps a report readable; whatever is left out is counted where it is missing.
ELEMENTS = 5
HTML_GROUPS = 20
MARKDOWN_GROUPS = 3
MARKDOWN_ROWS = 40

MEANING = {
    Status.MATCH: "within the derived bound of the float64 oracle",
    Status.CONVENTION: "agrees with a documented convention other than the one the suite takes by default",
    Status.KNOWN: "beyond the bound, and explained by an entry of the ledger",
    Status.DEFECT: "beyond the bound, and not in the ledger",
    Status.DRIFT: "within the bound, but much worse than the recorded baseline",
    Status.UNSUPPORTED: "the provider refuses, with a message",
    Status.UNAVAILABLE: "the provider is not installed or cannot be used here",
    Status.CRASHED: "the process died",
    Status.TIMED_OUT: "no result in time",
    Status.VACUOUS: "no element had a bound above zero, so nothing was tested",
}
MARKS = {
    Status.MATCH: "\u2713",
    Status.CONVENTION: "\u2248",
    Status.KNOWN: "\u2021",
    Status.DEFECT: "\u2717",
    Status.DRIFT: "\u2197",
    Status.UNSUPPORTED: "\u2205",
    Status.UNAVAILABLE: "\u2205",
    Status.CRASHED: "\u2020",
    Status.TIMED_OUT: "!",
    Status.VACUOUS: "\u25cb",
}


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: (status, count) pairs, the worst first, and the worst err/bound."""

    worst: str
    counts: list[tuple[str, int]]
    err_over_bound: str
    target: str = ""

    @property
    def text(self) -> str:
        """Without colour or marks: "12 (0.314)", "3 defect, 9 match (1.8e3)"."""
        bare = [
            str(n) if name == Status.MATCH and len(self.counts) == 1 else f"{n} {name}"
            for name, n in self.counts
        ]
        tail = "" if self.err_over_bound == formats.DASH else f" ({self.err_over_bound})"
        return ", ".join(bare) + tail


@dataclass(frozen=True)
class Row:
    """A provider's line under a quantity. ``same`` replaces the cells when all of them say only that."""

    provider: str
    cells: list[Cell | None]
    same: Cell | None


@dataclass(frozen=True)
class Panel:
    """The matrix of one operator: its boundary classes, and the rows of each quantity."""

    operator: str
    boundaries: list[str]
    quantities: list[tuple[str, list[Row]]]


@dataclass(frozen=True)
class Group:
    """Equal divergences, shown by their worst record."""

    anchor: str
    row: dict[str, Any]
    elements: list[dict[str, str]]
    more_elements: int
    command: str


@dataclass(frozen=True)
class Finding:
    """The groups that have status, provider, operator, convention and ledger entry in common."""

    anchor: str
    status: str
    provider: str
    version: str
    operator: str
    convention: str
    ledger: str
    reason: str
    link: str
    count: int
    cases: int
    err_over_bound: str
    groups: list[Group]


def _cell(row: Any, target: str) -> Cell:
    counts = [(str(status), int(row[str(status)])) for status in tables.SEVERITY if row[str(status)]]
    return Cell(row["worst"], counts, formats.ratio(row["err_over_bound"]), target)


def _panels(table: pd.DataFrame, targets: Mapping[tuple[str, ...], str]) -> list[Panel]:
    panels = []
    for operator, part in tables.matrix(table).groupby("operator", sort=False):
        boundaries = sorted(part["boundary"].unique(), key=tables.boundary_rank)
        quantities = []
        for quantity, lines in part.groupby("quantity", sort=False):
            rows = []
            for provider, line in lines.groupby("provider", sort=False):
                # One cell's link leads to the divergence that gave it its colour.
                place = str(provider), str(operator), str(quantity)
                cells = {
                    row["boundary"]: _cell(row, targets.get((row["worst"], *place, row["boundary"]), ""))
                    for row in line.to_dict("records")
                }
                silent = {str(Status.UNSUPPORTED), str(Status.UNAVAILABLE)}
                counts = [pair for cell in cells.values() for pair in cell.counts]
                kind, same = counts[0][0], None
                if kind in silent and all(name == kind for name, _ in counts):
                    same = Cell(kind, [(kind, sum(count for _, count in counts))], formats.DASH)
                rows.append(Row(str(provider), [cells.get(name) for name in boundaries], same))
            quantities.append((str(quantity), rows))
        panels.append(Panel(str(operator), boundaries, quantities))
    return panels


def _elements(worst: str) -> list[dict[str, str]]:
    found = []
    for element in json.loads(worst):
        expected, got = formats.pair(element["expected"], element["got"])
        found.append(
            {
                "index": formats.index(element["index"]),
                "samples": formats.samples(tuple(sample) for sample in element["samples"]),
                "expected": expected,
                "got": got,
                "err": formats.ratio(element["err_over_bound"]),
            }
        )
    return found


def _findings(table: pd.DataFrame, description: Mapping[str, Any]) -> list[Finding]:
    notes: Mapping[str, Any] = description.get("ledger", {})
    key = ["status", "ledger", "provider", "version", "operator", "convention"]
    findings = []
    anchor = 0
    groups_table = tables.divergences(table)
    cases: Mapping[Any, int] = table.groupby(key)["case"].nunique().to_dict()
    for number, (names, part) in enumerate(groups_table.groupby(key, sort=False), start=1):
        groups: list[Group] = []
        for row in part.to_dict("records"):
            anchor += 1
            elements = _elements(row["worst"]) if len(groups) < HTML_GROUPS else []
            shown = elements[:ELEMENTS]
            groups.append(
                Group(
                    f"d{anchor}",
                    {str(name): value for name, value in row.items()},
                    shown,
                    len(elements) - len(shown),
                    formats.command(row["case"]),
                )
            )
        status, ledger, provider, version, operator, convention = map(str, names)
        note = notes.get(ledger, {})
        link = str(note.get("link", ""))
        findings.append(
            Finding(
                f"f{number}",
                status,
                provider,
                version,
                operator,
                convention,
                ledger,
                str(note.get("reason", "")),
                link if link.startswith(("https://", "http://")) else "",
                int(part["count"].sum()),
                int(cases[names]),
                formats.ratio(part["err_over_bound"].max()),
                groups,
            )
        )
    return findings


def _facts(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What ran where, as (label, text)."""
    facts = [(name, str(description[name])) for name in ("tier", "command") if description.get(name)]
    started, finished = str(description.get("started", "")), str(description.get("finished", ""))
    if started:
        facts.append(("started", started + _lasted(started, finished)))
    if not finished:
        facts.append(("finished", "no: the run was interrupted, or says nothing of it"))
    for name in ("versions", "machine"):
        facts += [(str(label), str(value)) for label, value in description.get(name, {}).items()]
    return facts


def _lasted(started: str, finished: str) -> str:
    try:
        seconds = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return (
        f", took {int(seconds) // 60} min {int(seconds) % 60} s"
        if seconds >= 60
        else f", took {seconds:.1f} s"
    )


def context(table: pd.DataFrame, description: Mapping[str, Any]) -> dict[str, Any]:
    """All that the two templates show."""
    findings = _findings(table, description)
    targets: dict[tuple[str, ...], str] = {}
    for finding in findings:
        for position, group in enumerate(finding.groups):
            place = tuple(
                group.row[name] for name in ("status", "provider", "operator", "quantity", "boundary")
            )
            targets.setdefault(place, group.anchor if position < HTML_GROUPS else finding.anchor)
    present = [status for status in tables.SEVERITY if (table["status"] == str(status)).any()]
    return {
        "run": description.get("run", ""),
        "verdict": tables.verdict(table, description),
        "facts": _facts(description),
        "present": [str(status) for status in present],
        "meaning": {str(status): text for status, text in MEANING.items()},
        "marks": {str(status): mark for status, mark in MARKS.items()},
        "totals": {str(status): int((table["status"] == str(status)).sum()) for status in tables.SEVERITY},
        "all_cases": int(table["case"].nunique()),
        "summary": tables.summary(table).to_dict("records"),
        "panels": _panels(table, targets),
        "unavailable": tables.unavailable(table, description).to_dict("records"),
        "unsupported": tables.unsupported(table).to_dict("records"),
        "notes": [*description.get("not_compared", [])],
        "damaged": [*description.get("damaged", [])],
        "stale": [*description.get("stale_ledger", [])],
        "order": [str(status) for status in tables.DIVERGENCES],
        "findings": findings,
        "html_groups": HTML_GROUPS,
        "markdown_groups": MARKDOWN_GROUPS,
        "markdown_rows": MARKDOWN_ROWS,
    }


def _markdown_table(rows: Iterable[Iterable[object]], heads: Iterable[str]) -> str:
    """A pipe table. Cells are Markdown already: escape what is not with the filter ``md``."""
    frame = pd.DataFrame([[str(cell) for cell in row] for row in rows], columns=list(heads), dtype="str")
    return str(frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        ratio=formats.ratio,
        number=lambda value: f"{value:,}",
        cut=formats.cut,
        md=formats.markdown,
        code=formats.markdown_code,
        slug=lambda text: "-".join(str(text).split()),
    )
    environment.globals["table"] = _markdown_table
    return environment


def markdown(table: pd.DataFrame, description: Mapping[str, Any]) -> str:
    """The diff report as Markdown (GitHub's tables)."""
    return _environment().get_template("report.md.j2").render(context(table, description))


def html(table: pd.DataFrame, description: Mapping[str, Any]) -> str:
    """The diff report as one HTML page that loads nothing from outside and escapes all it shows."""
    return _environment().get_template("index.html.j2").render(context(table, description))


def write_report(folder: Path | str) -> Path:
    """Writes report.md and index.html into the run's folder and returns the path of index.html.

    Reads records.parquet and run.json only. Raises FileNotFoundError when the table is not there
    (`RunFolder.merge` writes it), ValueError when it is not a table of records.
    """
    folder = Path(folder)
    table, description = store.read_table(folder), store.read_description(folder)
    (folder / MARKDOWN).write_text(markdown(table, description), encoding="utf-8")
    (folder / HTML).write_text(html(table, description), encoding="utf-8")
    return folder / HTML
