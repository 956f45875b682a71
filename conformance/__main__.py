"""`python -m conformance`: what is installed, and which cases there are."""

from __future__ import annotations

import platform

import click
import torch
from rich.console import Console
from rich.table import Table

from cases.sweep import TIERS, devices, sweep
from conformance.providers import registry


@click.group()
def main() -> None:
    """Gradparity's conformance suite; the comparison itself is `pytest conformance/`."""


@main.command()
def doctor() -> None:
    """Says which providers can be compared here, in which version, and why others can't.

    Builds what is not built yet. Leaves with status 1 when something is not available.
    """
    loaded = [registry.load(provider) for provider in registry.built_in()]
    table = Table(
        title=f"Python {platform.python_version()}, torch {torch.__version__}, {', '.join(devices())}"
    )
    for heading in ("provider", "version", "why not"):
        table.add_column(heading, overflow="fold")
    for each in loaded:
        table.add_row(each.name, each.version or "not available", each.unavailable)
    Console().print(table)
    raise SystemExit(any(each.unavailable for each in loaded))


@main.command()
@click.option("--tier", type=click.Choice(TIERS), default="default", show_default=True)
def cases(tier: str) -> None:
    """Lists the ids of a tier's cases, for `pytest conformance/ --case ID`."""
    for case in sweep(tier):
        click.echo(case.id)


if __name__ == "__main__":
    main(prog_name="python -m conformance")
