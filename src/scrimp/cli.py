"""The command line: ``scrimp``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from scrimp import __version__
from scrimp._demo import demo as run_demo

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Memory-efficient backpropagation for PyTorch.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Memory-efficient backpropagation for PyTorch."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 20,
    fraction: Annotated[float, typer.Option(min=0.0, max=1.0, help="Aim at this part of the plain peak.")] = 0.5,
) -> None:
    """Train a small GPT on the CPU, plainly and within part of its memory, and compare peak, time and loss."""
    if not run_demo(Console(), steps, fraction):
        typer.echo("The losses differ: this is a bug, please report it.", err=True)
        raise typer.Exit(1)
