"""The diff report of a run: report.md and index.html, made from records.parquet and run.json alone.

Order: the verdict in a sentence, the providers, what diverges and why, provider by quantity by boundary
class, what was not compared, then details: the worst elements and the commands that rerun them.
"""

from __future__ import annotations

import itertools
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
NEW_ELEMENTS = 5
KNOWN_ELEMENTS = 2
HTML_GROUPS = 20
MARKDOWN_GROUPS = 3
MARKDOWN_ROWS = 20
# A run in which everything diverges is still a page; the rest is in the table.
MARKDOWN_NEW = 10

MEANING = {
    "defect": "beyond the bound, and not in the ledger",
    "new crash": "the process died, and the ledger does not say why",
    "new timeout": "no result in time, and the ledger does not say why",
    "new memory limit": "it wanted more memory than its limit, and the ledger does not say why",
    "new convention": "agrees with a convention other than the default one, and the ledger does not say so",
    "drift": "within the bound, but much worse than the recorded baseline",
    "known": "beyond the bound, and explained by an entry of the ledger",
    "known crash": "the process died, as an entry of the ledger says",
    "known timeout": "no result in time, as an entry of the ledger says",
    "known memory limit": "it wanted more memory than its limit, as an entry of the ledger says",
    "convention": "agrees with a convention other than the default one, as an entry of the ledger says",
    "unsupported": "the provider refuses, with a message",
    "unavailable": "the provider is not installed or cannot be used here",
    "match": "within the derived bound of the float64 oracle",
    "vacuous": "right, but every expected value is exactly zero: nothing was tested, and it counts as no match",
}
MARKS = {
    "defect": "\u2717",
    "new crash": "\u2717\u2020",
    "new timeout": "\u2717!",
    "new memory limit": "\u2717\u25b2",
    "new convention": "\u2717\u2248",
    "drift": "\u2197",
    "known": "\u2021",
    "known crash": "\u2020",
    "known timeout": "!",
    "known memory limit": "\u25b2",
    "convention": "\u2248",
    "unsupported": "\u2205",
    "unavailable": "\u2205",
    "match": "\u2713",
    "vacuous": "\u25cb",
}


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: (outcome, count) pairs, divergences first, and the worst err/bound."""

    worst: str
    counts: list[tuple[str, int]]
    err_over_bound: str
    target: str = ""

    @property
    def text(self) -> str:
        """Without colour, matches first: "12 (0.314)", "9 3\u2021 (1.8e3)"."""
        counts = [f"{n}{MARKS[name]}" for name, n in self.counts if name != "match"]
        counts[:0] = [str(n) for name, n in self.counts if name == "match"]
        tail = [] if self.err_over_bound == formats.DASH else [f"({self.err_over_bound})"]
        return " ".join(counts + tail)


@dataclass(frozen=True)
class Row:
    """A provider's line under a quantity. ``same`` replaces the cells when all of them say only that."""

    provider: str
    cells: list[Cell | None]
    same: Cell | None


@dataclass(frozen=True)
class Panel:
    """The matrix of one operator: its boundary classes in groups, and the rows of each quantity."""

    operator: str
    groups: list[tuple[str, list[str]]]
    quantities: list[tuple[str, list[Row]]]

    @property
    def boundaries(self) -> list[str]:
        """All columns."""
        return [name for _, names in self.groups for name in names]


@dataclass(frozen=True)
class Group:
    """Equal divergences, shown by their worst record."""

    anchor: str
    row: dict[str, Any]
    boundaries: str
    elements: list[dict[str, str]]
    more_elements: int
    command: str


@dataclass(frozen=True)
class Entry:
    """A finding as it is shown, with what the run says of its ledger entry."""

    anchor: str
    finding: tables.Finding
    status: str
    reason: str
    link: str
    quantities: str
    boundaries: str
    command: str
    elements: list[dict[str, str]]
    groups: list[Group]
    more_groups: int

    @property
    def name(self) -> str:
        """The ledger entry, or what is new."""
        finding, convention = self.finding, self.finding.example["convention"]
        return finding.ledger or " ".join(filter(None, (self.status, convention)))


def _cell(row: Any, target: str) -> Cell:
    # What diverges comes first; what was not compared does not hide the matches.
    order = (*tables.DIVERGENCES, str(Status.MATCH), *tables.OUTCOMES)
    counts = [(name, int(row[name])) for name in dict.fromkeys(order) if row[name]]
    return Cell(row["worst"], counts, formats.ratio(row["err_over_bound"]), target)


def _panels(table: pd.DataFrame, order: list[str], targets: Mapping[tuple[str, ...], str]) -> list[Panel]:
    panels = []
    for operator, part in tables.matrix(table, order).groupby("operator", sort=False):
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
                counts = [pair for cell in cells.values() for pair in cell.counts]
                kind, same = counts[0][0], None
                silent = kind in (str(Status.UNSUPPORTED), str(Status.UNAVAILABLE), str(Status.VACUOUS))
                if silent and all(name == kind for name, _ in counts):
                    same = Cell(kind, [(kind, sum(count for _, count in counts))], formats.DASH)
                rows.append(Row(str(provider), [cells.get(name) for name in boundaries], same))
            quantities.append((str(quantity), rows))
        groups = [(name, list(each)) for name, each in itertools.groupby(boundaries, tables.boundary_group)]
        panels.append(Panel(str(operator), groups, quantities))
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


def entries(table: pd.DataFrame, description: Mapping[str, Any]) -> list[Entry]:
    """The findings of a run as they are shown, in the order of `tables.findings`."""
    notes: Mapping[str, Any] = description.get("ledger", {})
    shown = []
    anchors = (f"d{number}" for number in itertools.count(1))
    findings = tables.findings(table, tables.provider_order(description))
    for number, finding in enumerate(findings, start=1):
        limit = NEW_ELEMENTS if finding.new else KNOWN_ELEMENTS
        groups = []
        for row in finding.groups.head(HTML_GROUPS).to_dict("records"):
            elements = _elements(row["worst"])
            groups.append(
                Group(
                    next(anchors),
                    {str(name): value for name, value in row.items()},
                    formats.names(row["boundaries"], finding.asked),
                    elements[:limit],
                    len(elements) - limit,
                    formats.command(row["case"]),
                )
            )
        note = notes.get(finding.ledger, {})
        link = str(note.get("link", ""))
        shown.append(
            Entry(
                f"f{number}",
                finding,
                next(iter(finding.counts)),
                str(note.get("reason", "")) or finding.example["message"],
                link if link.startswith(("https://", "http://")) else "",
                formats.quantities(finding.quantities),
                formats.names(finding.boundaries, finding.asked),
                formats.command(finding.example["case"]),
                _elements(finding.example["worst"])[:KNOWN_ELEMENTS],
                groups,
                len(finding.groups) - len(groups),
            )
        )
    return shown


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


def _targets(found: Iterable[Entry]) -> dict[tuple[str, ...], str]:
    """Where a cell of the matrix leads to: the group, or the finding when the group is not shown."""
    targets: dict[tuple[str, ...], str] = {}
    for entry in found:
        shown = len(entry.groups)
        for position, row in enumerate(entry.finding.groups.to_dict("records")):
            anchor = entry.groups[position].anchor if position < shown else entry.anchor
            for boundary in row["boundaries"]:
                place = (row["outcome"], entry.finding.provider, row["operator"], row["quantity"], boundary)
                targets.setdefault(place, anchor)
    return targets


def context(table: pd.DataFrame, description: Mapping[str, Any]) -> dict[str, Any]:
    """All that the two templates show."""
    found = entries(table, description)
    order = tables.provider_order(description)
    totals = tables.outcomes(table).value_counts()
    return {
        "run": description.get("run", ""),
        "verdict": tables.verdict(table, description),
        "facts": _facts(description),
        "present": [name for name in tables.OUTCOMES if name in totals],
        "meaning": MEANING,
        "marks": MARKS,
        "divergent": tables.DIVERGENCES,
        "measured": ("defect", "new convention", "drift", "known", "convention", "match"),
        "dash": formats.DASH,
        "totals": {str(name): int(count) for name, count in totals.items()},
        "all_cases": int(table["case"].nunique()),
        "summary": tables.summary(table, order).to_dict("records"),
        "panels": _panels(table, order, _targets(found)),
        "unavailable": tables.unavailable(table, description).to_dict("records"),
        "unsupported": tables.unsupported(table).to_dict("records"),
        "notes": [*description.get("not_compared", [])],
        "damaged": [*description.get("damaged", [])],
        "stale": [*description.get("stale_ledger", [])],
        "entries": found,
        "markdown_groups": MARKDOWN_GROUPS,
        "markdown_rows": MARKDOWN_ROWS,
        "brief": [each for each in found if each.finding.new][:MARKDOWN_NEW]
        + [each for each in found if not each.finding.new],
    }


def _markdown_table(rows: Iterable[Iterable[object]], heads: Iterable[str]) -> str:
    """A pipe table without padding. Cells are Markdown already: escape what is not with the filter ``md``."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _markdown_elements(elements: Iterable[Mapping[str, str]]) -> str:
    rows = [
        (each["index"], formats.markdown(each["samples"]), each["expected"], each["got"], each["err"])
        for each in elements
    ]
    return _markdown_table(rows, ["index", "samples (y, x) class", "expected", "got", "err/bound"])


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
    environment.globals.update(table=_markdown_table, elements=_markdown_elements)
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
    (`RunFolder.tabulate` writes it), ValueError when it is not a table of records.
    """
    folder = Path(folder)
    table, description = store.read_table(folder), store.read_description(folder)
    (folder / MARKDOWN).write_text(markdown(table, description), encoding="utf-8")
    (folder / HTML).write_text(html(table, description), encoding="utf-8")
    return folder / HTML
