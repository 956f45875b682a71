"""What a run's table says, as smaller tables: the verdict, what diverges, the matrix, what is missing.

Every function takes the table that `reports.store.read_table` returns (columns `reports.store.COLUMNS`, one
row per Record) and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.record import Status

# A record without a ledger entry that nobody has explained yet: it fails a run.
NEW = {
    Status.DEFECT: "defect",
    Status.CRASHED: "new crash",
    Status.TIMED_OUT: "new timeout",
    Status.OUT_OF_MEMORY: "new memory limit",
    Status.CONVENTION: "new convention",
}
# The same with a ledger entry. A defect in the ledger has a status of its own.
EXPLAINED = {
    Status.KNOWN: "known",
    Status.CRASHED: "known crash",
    Status.TIMED_OUT: "known timeout",
    Status.OUT_OF_MEMORY: "known memory limit",
    Status.CONVENTION: "convention",
}
ALARMS = tuple(NEW.values())
KNOWN = tuple(EXPLAINED.values())
# A status, told apart by whether the ledger explains it. What comes first colours a cell; the worst is first,
# and zeros that are right are last, because they say nothing.
OUTCOMES = (
    *(*ALARMS, str(Status.DRIFT), *KNOWN),
    *map(str, (Status.UNSUPPORTED, Status.UNAVAILABLE, Status.MATCH, Status.VACUOUS)),
)
DIVERGENCES = (*ALARMS, str(Status.DRIFT), *KNOWN)
# A number came out and was held against a bound above zero. All others are not comparisons.
COMPARED = (Status.MATCH, Status.CONVENTION, Status.KNOWN, Status.DEFECT, Status.DRIFT)

_SAID = {
    "defect": ("new defect", "new defects"),
    "new crash": ("new crash", "new crashes"),
    "new timeout": ("new timeout", "new timeouts"),
    "new memory limit": ("new memory limit", "new memory limits"),
    "new convention": ("new case of another convention", "new cases of another convention"),
    "known": ("known divergence", "known divergences"),
    "convention": ("under another convention", "under another convention"),
    "known crash": ("known crash", "known crashes"),
    "known timeout": ("known timeout", "known timeouts"),
    "known memory limit": ("known memory limit", "known memory limits"),
}

# Boundary classes from the inside of an image to the outside, boxes of odd shapes, then those that mix.
_CLASSES = (
    *("interior", "integer", "last_pixel", "rim", "edge_low", "edge_high", "outside"),
    *("half", "uneven", "beyond", "huge", "one_pixel", "empty", "inverted", "zero", "mixed"),
    *("nan_pixels", "non_finite"),
)
_BESIDE = ("below_integer", "above_integer", "inside_edge", "outside_edge", "above_grid", "below_half")
_DISTANCES = {"ulp": "one ulp beside a kink", "nano": "1e-9 beside a kink"}
_ORDERS = ["output", "grad:", "gradgrad:"]
_INPUTS = ["grad_output", "input", "rois", "offset", "mask", "weight", "bias"]


def boundary_rank(name: str) -> tuple[int, int, str]:
    """Sorts boundary classes outwards, then those one ulp beside a kink, those 1e-9 beside one, then others."""
    side, _, distance = name.rpartition("_")
    if name in _CLASSES:
        return 0, _CLASSES.index(name), name
    if side in _BESIDE and distance in _DISTANCES:
        return 1 + list(_DISTANCES).index(distance), _BESIDE.index(side), name
    return 1 + len(_DISTANCES), 0, name


def boundary_group(name: str) -> str:
    """The heading that the class stands under: empty for plain classes, else what it is beside of."""
    group = boundary_rank(name)[0]
    return ["", *_DISTANCES.values(), "other"][group]


def quantity_rank(name: str) -> tuple[int, int, str]:
    """Sorts quantities by order of derivative, then as the operators take their arguments; others by name."""
    order = next((rank for rank, start in enumerate(_ORDERS) if name.startswith(start)), len(_ORDERS))
    of = name.rpartition(":")[2]
    return order, _INPUTS.index(of) if of in _INPUTS else len(_INPUTS), name


def outcomes(table: pd.DataFrame) -> pd.Series[str]:
    """Each record's outcome, one of `OUTCOMES`.

    A crash, a timeout or another convention is known when the record names a ledger entry. A defect is new.
    """
    known = table["ledger"] != ""
    result: pd.Series[str] = table["status"].astype("str")
    for status, name in NEW.items():
        result = result.mask(table["status"] == str(status), name)
    for status, name in EXPLAINED.items():
        result = result.mask((table["status"] == str(status)) & (known | (status is Status.KNOWN)), name)
    return result


def _is_compared(table: pd.DataFrame) -> pd.Series[bool]:
    return table["status"].isin([str(status) for status in COMPARED])


def _counted(table: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """One row per key: counts per outcome, records and cases compared, the worst err/bound and outcome."""
    outcome, compared = outcomes(table), _is_compared(table)
    wide = table.assign(
        **{name: (outcome == name).astype("int64") for name in OUTCOMES},
        compared=compared.astype("int64"),
        # Only what was compared counts as a compared case, and has an error.
        compared_case=table["case"].where(compared),
        err_over_bound=table["err_over_bound"].where(table["status"] != str(Status.VACUOUS)),
        rank=outcome.map({name: rank for rank, name in enumerate(OUTCOMES)}).astype("int64"),
    )
    grouped = wide.groupby(key, sort=False, dropna=False)
    counted = grouped[[*OUTCOMES, "compared"]].sum()
    counted["cases"] = grouped["compared_case"].nunique()
    counted["err_over_bound"] = grouped["err_over_bound"].max()
    counted["worst"] = grouped["rank"].min().map(dict(enumerate(OUTCOMES)))
    flat: pd.DataFrame = counted.reset_index()
    return flat


def _sorted(counted: pd.DataFrame, key: list[str], providers: Iterable[str]) -> pd.DataFrame:
    order = {name: rank for rank, name in enumerate(providers)}
    ranks: dict[Any, Any] = {
        "quantity": quantity_rank,
        "boundary": boundary_rank,
        "provider": lambda name: (order.get(name, len(order)), name),
    }
    result: pd.DataFrame = counted.sort_values(
        key,
        key=lambda column: column.map(ranks[column.name]) if column.name in ranks else column,
        ignore_index=True,
    )
    return result


def matrix(table: pd.DataFrame, providers: Iterable[str] = ()) -> pd.DataFrame:
    """Provider by (operator, quantity) by boundary class, in long form: one row per cell that has records.

    Columns: operator, quantity, provider, boundary; an int64 count for each of `OUTCOMES`, under its name;
    compared (int64); cases (int64, those compared); err_over_bound (float64, the worst, NaN when nothing has
    one); worst (the first of `OUTCOMES` that occurs). Sorted by operator, quantity, provider (as in
    ``providers``, others by name) and boundary.
    """
    key = ["operator", "quantity", "provider", "boundary"]
    return _sorted(_counted(table, key), key, providers)


def summary(table: pd.DataFrame, providers: Iterable[str] = ()) -> pd.DataFrame:
    """One row per (provider, version): the columns of `matrix` without operator, quantity and boundary."""
    key = ["provider", "version"]
    return _sorted(_counted(table, key), key, providers)


@dataclass(frozen=True)
class Finding:
    """What diverges for one reason: a ledger entry, or what nobody has explained yet.

    ``ledger`` is empty for what is new (and for drift), ``rest`` tells such findings apart. ``counts`` are
    records by outcome, the worst first; ``boundaries`` are the classes hit, of all ``asked`` of the provider.
    ``err_over_bound`` leaves out what agrees with another convention.
    ``example`` is the record of the smallest case with the largest error, with the columns of the table.
    """

    ledger: str
    provider: str
    version: str
    new: bool
    operators: tuple[str, ...]
    quantities: tuple[str, ...]
    boundaries: tuple[str, ...]
    asked: tuple[str, ...]
    counts: dict[str, int]
    cases: int
    err_over_bound: float
    example: dict[str, Any]
    groups: pd.DataFrame

    @property
    def count(self) -> int:
        """Its records."""
        return sum(self.counts.values())


# What makes records one finding; what is in the ledger has the last three empty.
FINDING_KEY = ("ledger", "provider", "version", "operator_", "outcome_", "convention_")
# What makes records of one finding one group. Known ones are not told apart by boundary class.
GROUP_KEY = ("outcome", "device", "operator", "question", "quantity", "place", "convention")


def findings(table: pd.DataFrame, providers: Iterable[str] = ()) -> list[Finding]:
    """All that diverges: new findings first, then drift, then the ledger's, by provider and number of cases.

    A finding's ``groups`` has one row per `GROUP_KEY` (place is the boundary class of what is new): the
    columns of its worst record (largest err/bound; among equals the one with the fewest elements, then the
    first case by name), and outcome, count (records), cases (distinct case ids), dtypes ("float32 12,
    float64 3"), boundaries (tuple). A case's size is the number of elements of its output and first-order
    gradients, whoever was compared on them.
    """
    rows = table.assign(outcome=outcomes(table))
    rows = rows[rows["outcome"].isin(DIVERGENCES)]
    explained = rows["ledger"] != ""
    rows = rows.assign(
        place=rows["boundary"].mask(rows["outcome"].isin(KNOWN), ""),
        # A defect stays apart even when someone wrote an entry's id on it.
        **{
            f"{name}_": rows[name].mask(explained & rows["outcome"].isin(KNOWN), "")
            for name in ("operator", "outcome", "convention")
        },
    )
    # Whether second order was asked does not make a case larger.
    first_order = table[~table["quantity"].str.startswith("gradgrad")]
    sizes = first_order.groupby(["case", "quantity"])["elements"].max().groupby(level="case").sum()
    asked = table.groupby(["provider", "operator"])["boundary"].unique().to_dict()
    found = [_finding(part, sizes, asked) for _, part in rows.groupby(list(FINDING_KEY), sort=False)]
    order = {name: rank for rank, name in enumerate(providers)}
    severity = {name: rank for rank, name in enumerate(DIVERGENCES)}

    def rank(finding: Finding) -> tuple[Any, ...]:
        worst = severity[next(iter(finding.counts))]
        urgent = worst if worst < severity["known"] else severity["known"]
        provider = order.get(finding.provider, len(order)), finding.provider, finding.version
        return urgent, provider, -finding.cases, finding.operators, finding.ledger

    return sorted(found, key=rank)


def _finding(rows: pd.DataFrame, sizes: pd.Series[int], asked: Mapping[Any, Iterable[str]]) -> Finding:
    first = rows.iloc[0]
    provider, operators = str(first["provider"]), tuple(sorted(rows["operator"].unique()))
    counts = rows["outcome"].value_counts()
    cases = pd.DataFrame({"case": rows["case"].unique()})
    cases = cases.assign(size=cases["case"].map(sizes), length=cases["case"].str.len())
    smallest = cases.sort_values(["size", "length", "case"])["case"].iloc[0]
    # A crash has no elements to show; another quantity of the case may.
    examples = rows[rows["case"] == smallest].assign(silent=lambda part: part["worst"] == "[]")
    example = examples.sort_values(
        ["silent", "err_over_bound", "quantity"], ascending=[True, False, True], kind="stable"
    ).iloc[0]
    everywhere = {name for operator in operators for name in asked[provider, operator]}
    return Finding(
        ledger=str(first["ledger"]),
        provider=provider,
        version=str(first["version"]),
        new=first["outcome"] in ALARMS,
        operators=operators,
        quantities=tuple(sorted(rows["quantity"].unique(), key=quantity_rank)),
        boundaries=tuple(sorted(rows["boundary"].unique(), key=boundary_rank)),
        asked=tuple(sorted(everywhere, key=boundary_rank)),
        counts={name: int(counts[name]) for name in OUTCOMES if name in counts},
        cases=int(rows["case"].nunique()),
        err_over_bound=float(rows.loc[rows["status"] != str(Status.CONVENTION), "err_over_bound"].max()),
        example={str(name): value for name, value in example.items()},
        groups=_groups(rows),
    )


def _groups(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.sort_values(
        ["err_over_bound", "elements", "case"],
        ascending=[False, True, True],
        na_position="last",
        kind="stable",
    )
    key = list(GROUP_KEY)
    grouped = rows.groupby(key, sort=False)
    result: pd.DataFrame = rows.drop_duplicates(key).set_index(key)
    result["count"] = grouped.size()
    result["cases"] = grouped["case"].nunique()
    result["dtypes"] = grouped["dtype"].agg(_tally)
    hit = {names: tuple(sorted(set(part), key=boundary_rank)) for names, part in grouped["boundary"]}
    result["boundaries"] = [hit[names] for names in result.index]
    result = result.reset_index()
    result["rank"] = result["outcome"].map({name: rank for rank, name in enumerate(DIVERGENCES)})
    ordered: pd.DataFrame = result.sort_values(
        ["rank", "err_over_bound", "count", "case"],
        ascending=[True, False, False, True],
        na_position="last",
        ignore_index=True,
    ).drop(columns="rank")
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
    """The run in one sentence: how much was compared of what, what is new and in which provider, what is known.

    Clean means: something was compared, no outcome of `ALARMS` occurs, every ledger entry still holds, no
    recorded line was lost, and a run that says when it ``started`` says when it ``finished``. What the ledger
    knows, drift, absent providers and comparisons of zeros alone are named and do not spoil it.
    """
    outcome, compared = outcomes(table), table[_is_compared(table)]
    parts = []
    for name in ALARMS:
        rows = table[outcome == name]
        if len(rows):
            names = _names(rows).value_counts()
            where = ", ".join(
                f"{provider} ({count:,})" if len(names) > 1 else str(provider)
                for provider, count in names.items()
            )
            parts.append(f"{len(rows):,} {_SAID[name][len(rows) > 1]} in {where}")
    if stale := len(description.get("stale_ledger", [])):
        parts.append(f"{stale} ledger {'entry no longer holds' if stale == 1 else 'entries no longer hold'}")
    if lost := len(description.get("damaged", [])):
        parts.append(f"{lost} recorded {'line' if lost == 1 else 'lines'} could not be read")
    if description.get("started") and not description.get("finished"):
        parts.append("the run did not finish")
    clean = not parts and not compared.empty
    if not compared.empty and not outcome.isin(ALARMS).any():
        parts.insert(0, "no new defect")
    counts = {
        name: int((outcome == name).sum())
        for name in ("known", "convention", "known crash", "known timeout", "known memory limit")
    }
    if known := [f"{count:,} {_SAID[name][count > 1]}" for name, count in counts.items() if count]:
        parts.append(", ".join(known))
    if drift := int((table["status"] == str(Status.DRIFT)).sum()):
        parts.append(f"{drift:,} within the bound but drifted from the baseline")
    if zeros := int((table["status"] == str(Status.VACUOUS)).sum()):
        parts.append(f"{zeros:,} tested nothing but zeros")
    if absent := list(unavailable(table, description)["provider"]):
        parts.append(f"{', '.join(absent)} took no part")
    if compared.empty:
        return Verdict(": ".join(filter(None, ("Nothing was compared", "; ".join(parts)))) + ".", False)
    order = provider_order(description)
    present = sorted(
        set(zip(compared["provider"], _names(compared), strict=True)),
        key=lambda pair: (order.index(pair[0]) if pair[0] in order else len(order), pair[1]),
    )
    of = ", ".join(name for _, name in present)
    how_many = _counting(len(compared), "comparison"), _counting(compared["case"].nunique(), "case")
    return Verdict(f"{how_many[0]} of {of} on {how_many[1]}: {'; '.join(parts)}.", clean)


def provider_order(description: Mapping[str, Any]) -> list[str]:
    """The providers' names in the order of the run."""
    return [str(state.get("name", "?")) for state in description.get("providers", [])]


def _counting(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _names(rows: pd.DataFrame) -> pd.Series[str]:
    """Provider and version of each row."""
    return (rows["provider"] + " " + rows["version"]).str.strip()


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
