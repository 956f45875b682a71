"""One run of the shards that several machines made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports import store
from reports.store import Description, RunFolder


def merge(folders: Sequence[Path], root: Path | str = store.DEFAULT_ROOT) -> Path:
    """Joins the shards 1/N to N/N of a run in a new run folder in ``root``, with its table, and returns it.

    Raises ValueError when one is missing, there twice, unfinished, damaged or no shard, or of another run:
    other cases, providers, versions, sources, ledger or questions.
    """
    shards = [(folder, store.read_description(folder)) for folder in folders]
    _check_complete(shards)
    (_, first), *others = shards
    for folder, said in others:
        for what, value in first.get("identity", {}).items():
            if said.get("identity", {}).get(what) != value:
                raise ValueError(
                    f"runs: the {what} of {folder.name} differ from those of {folders[0].name}:"
                    f" {said.get('identity', {}).get(what)!r}, not {value!r}"
                )
        if said.get("tier") != first.get("tier"):
            raise ValueError(
                f"runs: {folder.name} is of the tier {said.get('tier')!r}, {folders[0].name} of {first.get('tier')!r}"
            )
    items = [(folder, RunFolder(folder).items()) for folder in folders]
    seen: dict[str, Path] = {}
    for folder, (found, _) in items:
        if twice := found.keys() & seen.keys():
            name = min(twice)
            raise ValueError(f"runs: {folder.name} and {seen[name].name} overlap: both have {name}")
        seen.update(dict.fromkeys(found, folder))
    with RunFolder.create(root) as merged:
        for _, (found, _) in items:
            for item in found.values():
                merged.append(item.name, item.records, finished=item.finished)
    merged.tabulate(_joined([said for _, said in shards]))
    return merged.path


def _check_complete(shards: Sequence[tuple[Path, Description]]) -> None:
    there: dict[int, Path] = {}
    counts: set[int] = set()
    for folder, said in shards:
        if not said.get("shard"):
            raise ValueError(f"runs: {folder.name} is no shard: it was made without --shard")
        if not said.get("finished"):
            raise ValueError(f"runs: {folder.name}, shard {said['shard']}, did not finish; --resume it first")
        number, count = map(int, said["shard"].split("/"))
        if number in there:
            raise ValueError(
                f"runs: {folder.name} and {there[number].name} overlap: both are shard {said['shard']}"
            )
        there[number] = folder
        counts.add(count)
    if len(counts) != 1:
        raise ValueError(
            f"runs: they are of {' and of '.join(map(str, sorted(counts)))} shards, expected one number"
        )
    (count,) = counts
    if missing := [f"{number}/{count}" for number in range(1, count + 1) if number not in there]:
        raise ValueError(f"runs: shard {', '.join(missing)} is missing")


def _joined(said: Sequence[Description]) -> dict[str, Any]:
    """The description of all: what they have in common, and whatever one of them says beyond."""
    machines = [each.get("machine", {}) for each in said]
    facts = dict.fromkeys(name for machine in machines for name in machine)
    merged: dict[str, Any] = {
        **said[0],
        "command": "; ".join(dict.fromkeys(each.get("command", "") for each in said)),
        "started": min(each["started"] for each in said),
        "finished": max(each["finished"] for each in said),
        "machine": {
            name: "; ".join(dict.fromkeys(machine.get(name, "?") for machine in machines)) for name in facts
        },
        **{
            name: list(dict.fromkeys(line for each in said for line in each.get(name, [])))  # type: ignore[attr-defined]
            for name in ("not_compared", "stale_ledger")
        },
    }
    del merged["shard"]
    return merged
