"""The command line: ``scrimp``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scrimp import __version__
from scrimp._demo import demo as run_demo
from scrimp._machine import MACHINES
from scrimp._machine import machine as machine_named
from scrimp._plan_command import find_trace, plans_for, read_budget, read_tier, table_of
from scrimp.errors import BudgetError, ScrimpError

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
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 100,
    fraction: Annotated[float, typer.Option(min=0.0, max=1.0, help="Give it this part of the plain peak.")] = 0.5,
) -> None:
    """Train a small GPT on the CPU, plainly and within part of its memory, and compare peak, time and loss."""
    try:
        same = run_demo(Console(), steps, fraction)
    except BudgetError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not same:
        typer.echo("The losses differ: this is a bug, please report it.", err=True)
        raise typer.Exit(1)


@app.command()
def plan(
    source: Annotated[
        str,
        typer.Argument(help="A saved trace (JSON), or module:function returning (model, arguments). Nothing is run."),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help='Such as "8GiB", or 0.5 of the machine. Several times for several plans.'),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host memory that stored values may take; none without it.")] = None,
    disk: Annotated[str | None, typer.Option(help="Bytes of files that they may take beyond that.")] = None,
    machine: Annotated[str, typer.Option(help=f"Whose times to estimate: {', '.join(MACHINES)}.")] = "H200",
    points: Annotated[int, typer.Option(min=2, help="Without a budget: how many to plan for.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Save the plan here; needs one budget.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Save the trace here.")] = None,
) -> None:
    """Plan a training step within a budget, or draw peak against time for many, without running it."""
    if save and len(budget or ()) != 1:
        raise typer.BadParameter("need exactly one --budget to save its plan", param_hint="--save")
    try:
        on = machine_named(machine)
        budgets = [read_budget(text, on) for text in budget or ()]
        with warnings.catch_warnings(record=True) as guesses:
            warnings.simplefilter("always")
            trace = find_trace(source, on)
        for guess in guesses:
            typer.echo(f"Note: {guess.message}", err=True)
        if save_trace:
            trace.save(save_trace)
        plans = plans_for(trace, budgets, points, read_tier(host), read_tier(disk))
    except ScrimpError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    Console().print(table_of(trace, plans))
    if save:
        plans[0].save(save)
