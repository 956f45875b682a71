"""`python -m benchmarks`: medians and ratios of one run, on the screen and as a table for pandas."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click
import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import operators
from benchmarks.contest import REFERENCE, TASKS, Contest, Function, Row, run


def _modules() -> dict[str, ModuleType]:
    return {
        found.name: importlib.import_module(f"{operators.__name__}.{found.name}")
        for found in pkgutil.iter_modules(operators.__path__)
    }


@click.command()
@click.option("--op", type=click.Choice(sorted(_modules())), multiple=True, help="only this operator")
@click.option("--shape", metavar="TEXT", default="", help="only shapes whose name contains this")
@click.option("--task", type=click.Choice(list(TASKS)), multiple=True, help="only this task")
@click.option(
    "--threads", type=click.IntRange(1), multiple=True, help="thread counts (default: 1 and all cores)"
)
@click.option("--against", multiple=True, metavar="NAME", help="only the reference and this contestant")
@click.option(
    "--rounds", type=click.IntRange(1), default=9, show_default=True, help="how often each one runs"
)
@click.option("--csv", type=click.Path(dir_okay=False, path_type=Path), help="also write the table there")
def main(
    op: tuple[str, ...],
    shape: str,
    task: tuple[str, ...],
    threads: tuple[int, ...],
    against: tuple[str, ...],
    rounds: int,
    csv: Path | None,
) -> None:
    """Compare the speed of everybody who is installed here. A ratio above 1 is slower than the reference."""
    counts = threads or tuple(dict.fromkeys((1, os.cpu_count() or 1)))
    plan = [
        (module, candidate, count, what)
        for name, module in _modules().items()
        for candidate in module.SHAPES
        for count in counts
        for what in task or TASKS
        if (not op or name in op) and shape in str(candidate)
    ]
    if not plan:
        raise click.UsageError(f"--shape: no shape contains {shape!r}")
    rows: list[Row] = []
    for module, candidate, count, what in track(plan, "timing", console=Console(stderr=True)):
        contest = _narrowed(module.contest(candidate, torch.float32), against)
        rows += run(contest, what, count, rounds)
    table = pd.DataFrame([dataclasses.asdict(row) for row in rows])
    if csv is not None:
        table.to_csv(csv, index=False)
    _print(table)


def _narrowed(contest: Contest, against: tuple[str, ...]) -> Contest:
    names = {*contest.contestants, *contest.floors}
    if unknown := set(against) - names:
        raise click.UsageError(
            f"--against: got {unknown.pop()!r}, expected one of {', '.join(sorted(names))}"
        )

    def chosen(functions: Mapping[str, Function]) -> dict[str, Function]:
        return {
            name: function
            for name, function in functions.items()
            if not against or name in (REFERENCE, *against)
        }

    return replace(contest, contestants=chosen(contest.contestants), floors=chosen(contest.floors))


def _print(table: pd.DataFrame) -> None:
    console = Console()
    for (operator, shape, threads), part in table.groupby(["operator", "shape", "threads"], sort=False):
        tasks = list(dict.fromkeys(part["task"]))
        shown = Table(*["", *tasks], title=f"{operator} {shape}, {threads} thread(s): ms (ratio)")
        for contestant, cells in part.groupby("contestant", sort=False):
            by_task = cells.set_index("task")
            shown.add_row(
                str(contestant),
                *(
                    by_task.at[task, "note"]
                    or f"{by_task.at[task, 'milliseconds']:.1f} ({by_task.at[task, 'ratio']:.2f})"
                    for task in tasks
                ),
            )
        console.print(shown)


if __name__ == "__main__":
    main()
