"""`python -m reports render [RUN]` writes a run's report again, `show [RUN]` prints its summary."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import formats, render, store, tables
from reports.record import Status

_STYLES = {
    Status.DEFECT: "red",
    Status.CRASHED: "magenta",
    Status.TIMED_OUT: "magenta",
    Status.VACUOUS: "yellow",
    Status.DRIFT: "yellow",
    Status.KNOWN: "blue",
    Status.CONVENTION: "cyan",
    Status.UNSUPPORTED: "bright_black",
    Status.UNAVAILABLE: "bright_black",
    Status.MATCH: "green",
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
            store.RunFolder(folder).merge()
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
    """Print the summary of RUN."""
    folder = _folder(run, root)
    try:
        table, description = store.read_table(folder), store.read_description(folder)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    verdict = tables.verdict(table, description)
    console.print(Text(verdict.sentence, style="bold green" if verdict.clean else "bold red"))
    grid = Table("provider", "version", box=None, pad_edge=False, header_style="bold")
    grid.add_column("cases", justify="right")
    grid.add_column("records")
    grid.add_column("worst err/bound", justify="right")
    for row in tables.summary(table).to_dict("records"):
        counts = [
            Text(f"{row[str(status)]:,}\u00a0{status}", style=_STYLES[status])
            for status in tables.SEVERITY
            if row[str(status)]
        ]
        worst = formats.ratio(row["err_over_bound"])
        records = Text(", ").join(counts)
        grid.add_row(Text(row["provider"]), Text(row["version"]), f"{row['cases']:,}", records, worst)
    console.print(grid)
    for line in tables.not_compared(table, description):
        console.print(Text(f"not compared: {line}"), soft_wrap=True)
    report = folder / render.HTML
    if report.is_file():
        console.print(Text(f"report: {report}"), soft_wrap=True)


if __name__ == "__main__":
    main(prog_name="python -m reports")
