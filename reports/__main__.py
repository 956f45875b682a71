"""`python -m reports`: `render` a run's report again, `show` its summary, `merge` the shards of one."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import formats, render, store, tables
from reports.merge import merge

_STYLES = {
    **dict.fromkeys(tables.ALARMS, "red"),
    "drift": "yellow",
    "known": "blue",
    "known crash": "magenta",
    "known timeout": "magenta",
    "known memory limit": "magenta",
    "convention": "cyan",
    "match": "green",
}

_root = click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=store.DEFAULT_ROOT,
    show_default=True,
    help="The folder that holds the runs.",
)
_run = click.argument("run", default=store.LATEST)


def _folder(run: str, root: Path) -> Path:
    """The run's folder, with a table in it: an interrupted run has its records, but nobody merged them."""
    try:
        folder = store.find_run(run, root)
        if not (folder / store.TABLE).is_file():
            store.RunFolder(folder).tabulate()
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    return folder


@click.group()
def main() -> None:
    """Reports of conformance runs. RUN is a run's id, its folder, or "latest"."""


@main.command("render")
@_run
@_root
def render_command(run: str, root: Path) -> None:
    """Write report.md and index.html of RUN again, from its table and description."""
    try:
        click.echo(render.write_report(_folder(run, root)))
    except ValueError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@_run
@_root
def show(run: str, root: Path) -> None:
    """Print what RUN came to: verdict, providers, what diverges and why, what was not compared."""
    folder = _folder(run, root)
    try:
        table, description = store.read_table(folder), store.read_description(folder)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    verdict = tables.verdict(table, description)
    console.print(Text(verdict.sentence, style="bold green" if verdict.clean else "bold red"))
    for line in description.get("stale_ledger", []):
        console.print(Text(line, style="red"))
    providers = tables.provider_order(description)
    grid = Table("provider", "version", box=None, pad_edge=False, header_style="bold")
    grid.add_column("cases", justify="right")
    grid.add_column("records")
    grid.add_column("worst err/bound", justify="right")
    for row in tables.summary(table, providers).to_dict("records"):
        counts = _counts({name: row[name] for name in tables.OUTCOMES if row[name]}, "\n")
        worst = formats.ratio(row["err_over_bound"])
        grid.add_row(Text(row["provider"]), Text(row["version"]), f"{row['cases']:,}", counts, worst)
    console.print(grid)
    for entry in render.entries(table, description):
        _print_entry(console, entry)
    console.print()
    for line in tables.not_compared(table, description):
        console.print(Text(f"not compared: {line}"), soft_wrap=True)
    report = folder / render.HTML
    if report.is_file():
        console.print(Text(f"report: {report}"), soft_wrap=True)


@main.command("merge")
@click.argument("runs", nargs=-1, required=True)
@_root
def merge_command(runs: tuple[str, ...], root: Path) -> None:
    """Join RUNS, the shards of one run, in a new run, and write its report.

    Leaves with status 1 when something in it is new, or the runs are not all shards of one.
    """
    try:
        folder = merge([store.find_run(run, root) for run in runs], root)
        page = render.write_report(folder)
        verdict = tables.verdict(store.read_table(folder), store.read_description(folder))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(verdict.sentence)
    click.echo(page)
    raise SystemExit(not verdict.clean)


def _counts(counts: dict[str, int], separator: str = ", ") -> Text:
    return Text(separator).join(
        Text(f"{count:,}\u00a0{name}", style=_STYLES.get(name, "bright_black"))
        for name, count in counts.items()
    )


def _print_entry(console: Console, entry: render.Entry) -> None:
    finding = entry.finding
    console.print()
    where = f"  {finding.provider} {finding.version}, {', '.join(finding.operators)}"
    console.print(Text.assemble((entry.name, "bold red" if finding.new else "bold"), where))
    lines = [
        Text(formats.cut(entry.reason, 300)),
        Text(entry.link),
        Text.assemble(_counts(finding.counts), f" on {finding.cases:,} case{'s' * (finding.cases != 1)}"),
        Text(f"{entry.quantities}; at {entry.boundaries}"),
    ]
    for line in filter(None, lines):
        console.print(Padding(line, (0, 0, 0, 2)))
    # Not wrapped, so that it can be copied.
    console.print(Text(f"  {entry.command}", style="bright_black"), soft_wrap=True)


if __name__ == "__main__":
    main(prog_name="python -m reports")
