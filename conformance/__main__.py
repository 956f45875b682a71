"""`python -m conformance`: what is installed, and which cases there are."""

from __future__ import annotations

import platform
from pathlib import Path

import click
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from cases.sweep import TIERS, devices, sweep
from conformance import environments
from conformance.providers import registry, remote


@click.group()
def main() -> None:
    """Gradparity's conformance suite; the comparison itself is `pytest conformance/`."""


@main.command()
@click.option("--provider", "specs", multiple=True, metavar="SPEC", help="As `pytest conformance/` takes it.")
def doctor(specs: tuple[str, ...]) -> None:
    """Says which providers can be compared here, in which version, and why others can't.

    Builds what is not built yet. Leaves with status 1 when something is not available.
    """
    try:
        named = [registry.from_spec(spec) for spec in specs]
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    loaded = [registry.load(provider) for provider in (*registry.built_in(), *named)]
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


@main.group()
def env() -> None:
    """Environments of other releases, for `pytest conformance/ --provider NAME=python:EXECUTABLE,kind=KIND`."""


@env.command("create")
@click.argument("requirements", nargs=-1, required=True)
@click.option("--python", "version", metavar="VERSION", help="Of Python; without it, the newest that fits.")
@click.option(
    "--into",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to; else into the cache.",
)
def create_environment(requirements: tuple[str, ...], version: str | None, folder: Path | None) -> None:
    """Makes an environment with REQUIREMENTS, such as torchvision==0.10.0 mmcv-full==1.6.2, and says how to use it."""
    try:
        python = environments.create(requirements, version, folder)
    except environments.CannotMakeError as error:
        raise click.ClickException(str(error)) from error
    for requirement in requirements:
        kind = Requirement(requirement).name.removesuffix("-full").removesuffix("-lite")
        if kind in remote.kinds():
            click.echo(f"--provider {requirement.replace('==', '-')}=python:{python},kind={kind}")


if __name__ == "__main__":
    main(prog_name="python -m conformance")
