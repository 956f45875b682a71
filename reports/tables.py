"""What a run's table says, as smaller tables: the verdict, the matrix, the divergences, what is missing.

Every function takes the table that `reports.store.read_table` returns (columns `reports.store.COLUMNS`, one
row per Record) and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.record import Status

# What a cell or a provider is coloured by: the first of these that occurs in it.
SEVERITY = (
    Status.DEFECT,
    Status.CRASHED,
    Status.TIMED_OUT,
    Status.VACUOUS,
    Status.DRIFT,
    Status.KNOWN,
    Status.CONVENTION,
    Status.UNSUPPORTED,
    Status.UNAVAILABLE,
    Status.MATCH,
)
# Divergences in the order in which a report lists them.
DIVERGENCES = (
    Status.DEFECT,
    Status.CONVENTION,
    Status.KNOWN,
    Status.DRIFT,
    Status.CRASHED,
    Status.TIMED_OUT,
    Status.VACUOUS,
)
# A number came out and was held against the bound. All others are not comparisons.
COMPARED = (Status.MATCH, Status.CONVENTION, Status.KNOWN, Status.DEFECT, Status.DRIFT)
# What nobody has explained yet.
ALARMS = (Status.DEFECT, Status.CRASHED, Status.TIMED_OUT, Status.VACUOUS)
_PLURAL = {
    Status.DEFECT: ("new defect", "new defects"),
    Status.CRASHED: ("crash", "crashes"),
    Status.TIMED_OUT: ("timeout", "timeouts"),
    Status.VACUOUS: ("comparison that tested no element", "comparisons that tested no element"),
}

# Boundary classes from the inside of an image to the outside; others follow by name.
_OUTWARDS = ["interior", "integer", "last_pixel", "rim", "edge", "outside", "non_finite"]
_ORDERS = ["output", "grad:", "gradgrad:"]
_INPUTS = ["input", "rois", "offset", "mask", "weight", "bias"]

DIVERGENCE_KEY = (
    *("status", "provider", "version", "device", "operator", "question", "quantity", "boundary"),
    *("convention", "ledger"),
)


def boundary_rank(name: str) -> tuple[int, int, str]:
    """Sorts boundary classes outwards; "below_edge" and "edge-1e-9" go beside "edge"."""
    plain = name.replace("-", "_").replace(" ", "_")
    base = next((rank for rank, base in enumerate(_OUTWARDS) if base in plain), len(_OUTWARDS))
    side = 0 if plain in _OUTWARDS else -1 if "below" in plain else 1
    return base, side, name


def quantity_rank(name: str) -> tuple[int, int, str]:
    """Sorts quantities by order of derivative, then as the operators take their arguments; others by name."""
    order = next((rank for rank, start in enumerate(_ORDERS) if name.startswith(start)), len(_ORDERS))
    of = name.rpartition(":")[2]
    return order, _INPUTS.index(of) if of in _INPUTS else len(_INPUTS), name


def _counted(table: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """One row per key: counts per status, records and cases compared, the worst err/bound and status."""
    names = [str(status) for status in SEVERITY]
    compared = table["status"].isin([str(status) for status in COMPARED])
    wide = table.assign(
        **{name: (table["status"] == name).astype("int64") for name in names},
        compared=compared.astype("int64"),
        # Only what was compared counts as a compared case.
        compared_case=table["case"].where(compared),
        rank=table["status"].map({name: rank for rank, name in enumerate(names)}).astype("int64"),
    )
    grouped = wide.groupby(key, sort=False, dropna=False)
    counted = grouped[[*names, "compared"]].sum()
    counted["cases"] = grouped["compared_case"].nunique()
    counted["err_over_bound"] = grouped["err_over_bound"].max()
    counted["worst"] = grouped["rank"].min().map(dict(enumerate(names)))
    flat: pd.DataFrame = counted.reset_index()
    return flat


def matrix(table: pd.DataFrame) -> pd.DataFrame:
    """Provider by (operator, quantity) by boundary class, in long form: one row per cell that has records.

    Columns: operator, quantity, provider, boundary; an int64 count for each status, under its name;
    compared (int64); cases (int64, those compared); err_over_bound (float64, the worst, NaN when nothing has
    one); worst (the worst status, see `SEVERITY`). Sorted by operator, quantity, provider and boundary,
    outwards.
    """
    key = ["operator", "quantity", "provider", "boundary"]
    ranks = {"quantity": quantity_rank, "boundary": boundary_rank}
    cells: pd.DataFrame = _counted(table, key).sort_values(
        key,
        key=lambda column: column.map(ranks[column.name]) if column.name in ranks else column,
        ignore_index=True,
    )
    return cells


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row per (provider, version): the columns of `matrix` without operator, quantity and boundary."""
    key = ["provider", "version"]
    counted: pd.DataFrame = _counted(table, key).sort_values(key, ignore_index=True)
    return counted


def divergences(table: pd.DataFrame) -> pd.DataFrame:
    """Everything that is neither a match nor missing, equal divergences as one row with their worst record.

    Equal means equal in `DIVERGENCE_KEY`. Columns: all of a record's, from the worst one of the group
    (largest err/bound; among equals the one with the fewest elements, then the first case by name), and
    count (records), cases (distinct case ids), dtypes ("float32 12, float64 3"). Sorted by status in the
    order of `DIVERGENCES`, ledger entry, provider, then the worst first.
    """
    order = {str(status): rank for rank, status in enumerate(DIVERGENCES)}
    rows = table[table["status"].isin(list(order))]
    rows = rows.sort_values(
        ["err_over_bound", "elements", "case"],
        ascending=[False, True, True],
        na_position="last",
        kind="stable",
    )
    key = list(DIVERGENCE_KEY)
    grouped = rows.groupby(key, sort=False, dropna=False)
    result: pd.DataFrame = rows.drop_duplicates(key).set_index(key)
    result["count"] = grouped.size()
    result["cases"] = grouped["case"].nunique()
    result["dtypes"] = grouped["dtype"].agg(_tally) if len(rows) else pd.Series(dtype="str")
    result = result.reset_index()
    result["rank"] = result["status"].map(order)
    result = result.sort_values(
        ["rank", "ledger", "provider", "version", "operator", "err_over_bound", "count", "case"],
        ascending=[True, True, True, True, True, False, False, True],
        na_position="last",
        ignore_index=True,
    )
    ordered: pd.DataFrame = result[[*table.columns, "count", "cases", "dtypes"]]
    return ordered


def _tally(values: pd.Series[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(values.value_counts().items()))


def unsupported(table: pd.DataFrame) -> pd.DataFrame:
    """What providers refused: one row per (provider, version, operator, question).

    Columns besides these: count (records), cases, message (the commonest), messages (how many distinct ones).
    """
    key = ["provider", "version", "operator", "question"]
    rows = table[table["status"] == str(Status.UNSUPPORTED)]
    if rows.empty:
        empty: pd.DataFrame = pd.DataFrame(columns=[*key, "count", "cases", "message", "messages"])
        return empty
    grouped = rows.groupby(key)
    result: pd.DataFrame = pd.DataFrame(
        {
            "count": grouped.size(),
            "cases": grouped["case"].nunique(),
            "message": grouped["message"].agg(lambda texts: str(texts.mode().iloc[0])),
            "messages": grouped["message"].nunique(),
        }
    ).reset_index()
    return result


def unavailable(table: pd.DataFrame, description: Mapping[str, Any]) -> pd.DataFrame:
    """Providers that took no part: columns provider and reason, from the description and the records."""
    reasons = {
        str(state.get("name", "?")): str(state.get("reason", "") or "no reason given")
        for state in description.get("providers", [])
        if not state.get("available", True)
    }
    for provider, message in (
        table.loc[table["status"] == str(Status.UNAVAILABLE), ["provider", "message"]]
        .drop_duplicates("provider")
        .itertuples(index=False)
    ):
        reasons.setdefault(str(provider), str(message) or "no reason given")
    result: pd.DataFrame = pd.DataFrame(sorted(reasons.items()), columns=["provider", "reason"])
    return result


@dataclass(frozen=True)
class Verdict:
    """``sentence`` sums up a run; ``clean`` is False when something in it is unexplained or nothing was
    compared."""

    sentence: str
    clean: bool


def verdict(table: pd.DataFrame, description: Mapping[str, Any]) -> Verdict:
    """The run in one sentence: how much was compared of what, and every unexplained thing with its provider.

    Clean means: something was compared, no status of `ALARMS` occurs, every ledger entry still holds, no
    recorded line was lost, and a run that says when it ``started`` says when it ``finished``. Drift and
    absent providers are named and do not spoil it: whether they fail a run is the run's business.
    """
    compared = table[table["status"].isin([str(status) for status in COMPARED])]
    if compared.empty:
        return Verdict("Nothing was compared.", False)
    parts = []
    for status in ALARMS:
        rows = table[table["status"] == str(status)]
        if len(rows):
            names = _names(rows).value_counts()
            where = ", ".join(
                f"{name} ({count:,})" if len(names) > 1 else str(name) for name, count in names.items()
            )
            parts.append(f"{len(rows):,} {_PLURAL[status][len(rows) > 1]} in {where}")
    if not any(table["status"] == str(Status.DEFECT)):
        parts.insert(0, "no new defect")
    if stale := len(description.get("stale_ledger", [])):
        parts.append(f"{stale} ledger {'entry no longer holds' if stale == 1 else 'entries no longer hold'}")
    if lost := len(description.get("damaged", [])):
        parts.append(f"{lost} recorded {'line' if lost == 1 else 'lines'} could not be read")
    if description.get("started") and not description.get("finished"):
        parts.append("the run did not finish")
    clean = parts == ["no new defect"]
    if drift := int((table["status"] == str(Status.DRIFT)).sum()):
        parts.append(f"{drift:,} within the bound but drifted from the baseline")
    if absent := list(unavailable(table, description)["provider"]):
        parts.append(f"{', '.join(absent)} took no part")
    of = ", ".join(sorted(set(_names(compared))))
    how_many = _counting(len(compared), "comparison"), _counting(compared["case"].nunique(), "case")
    return Verdict(f"{how_many[0]} of {of} on {how_many[1]}: {_joined(parts)}.", clean)


def _counting(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _names(rows: pd.DataFrame) -> pd.Series[str]:
    """Provider and version of each row."""
    return (rows["provider"] + " " + rows["version"]).str.strip()


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{'; '.join(parts[:-1])}; and {parts[-1]}"


def not_compared(table: pd.DataFrame, description: Mapping[str, Any]) -> list[str]:
    """Sentences for the end of a run: absent providers, what was refused, what the description adds."""
    lines = [
        f"{row.provider} is not available: {row.reason}" for row in _rows(unavailable(table, description))
    ]
    for (provider, version), rows in unsupported(table).groupby(["provider", "version"]):
        asked: dict[str, list[str]] = {}
        for operator, each in rows.groupby("operator"):
            asked.setdefault(", ".join(each["question"]), []).append(str(operator))
        what = "; ".join(f"{questions} of {', '.join(operators)}" for questions, operators in asked.items())
        lines.append(f"{provider} {version} refused {int(rows['count'].sum()):,} times: {what}")
    lines += [str(line) for line in description.get("not_compared", [])]
    lines += [f"{line} could not be read" for line in description.get("damaged", [])]
    return lines


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples(index=False))
