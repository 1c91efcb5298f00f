"""What ``scrimp plan`` does: a trace from a file or from code that never runs, and a table of plans for it."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from scrimp._budget import Budget, format_bytes, parse_budget
from scrimp._fake_trace import trace_on
from scrimp._machine import Machine
from scrimp._plan import Drop, Keep, Plan, Store
from scrimp._solve import frontier, plan
from scrimp._trace import Trace
from scrimp.errors import TraceError


def find_trace(source: str, machine: Machine) -> Trace:
    """Load a trace from a file, or make one of ``module:function``, which returns a model and its arguments."""
    if source.endswith(".json") or Path(source).is_file():
        if not Path(source).is_file():
            raise TraceError(f"need a trace that was saved, have no file {source}")
        return Trace.load(source)
    name, colon, function = source.partition(":")
    if not colon or not name or not function:
        raise TraceError(f"need a trace's file, or module:function; have {source!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(name), function, None)
    except ModuleNotFoundError as error:
        raise TraceError(f"need a module that can be imported from here, have {name!r}: {error}") from error
    finally:
        sys.path.pop(0)
    if not callable(make):
        raise TraceError(f"need a function {function!r} in {name}, have {make!r}")
    with torch.device("meta"):
        made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], tuple):
        raise TraceError(f"need {source} to return (model, arguments), the latter a tuple; have {made!r:.80}")
    model, args = made
    return trace_on(machine, model, *args)


def read_budget(text: str, machine: Machine) -> int:
    """Bytes of a budget as it is typed: a size, bytes, or a fraction of the machine."""
    budget: Budget = text
    if text.isdecimal():
        budget = int(text)
    elif text.replace(".", "", 1).isdecimal():
        budget = float(text)
    return parse_budget(budget, capacity=machine.memory)


def read_tier(text: str | None) -> int | None:
    """Bytes of a store as they are typed: a size or bytes; nothing where there is none."""
    if text is None:
        return None
    return parse_budget(int(text) if text.isdecimal() else text)


def plans_for(
    trace: Trace, budgets: Sequence[int], points: int, host: int | None = None, disk: int | None = None
) -> tuple[Plan, ...]:
    """A plan for each budget; without any, the frontier."""
    plans = tuple(plan(trace, budget, host=host, disk=disk) for budget in budgets)
    return plans or frontier(trace, points, host=host, disk=disk)


def table_of(trace: Trace, plans: Sequence[Plan]) -> Table:
    """Peak against time."""
    table = Table("budget", "peak", "time", "over plain", "no plan below", "kept", "dropped", "stored")
    for column in table.columns:
        column.justify = "right"
    plain = plans[0].plain_seconds
    for made in plans:
        kinds = Counter(type(decision) for decision in made.decisions.values())
        table.add_row(
            format_bytes(made.budget),
            format_bytes(made.peak),
            f"{made.seconds * 1e3:.1f} ms",
            f"{made.added_seconds / plain:+.1%}",
            f"{made.bound_seconds / plain - 1:+.1%}",
            *(str(kinds[kind]) for kind in (Keep, Drop, Store)),
        )
    resident = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in trace.resident)
    table.caption = f"{len(trace.ops)} operators; there before the step: {resident or 'nothing'}"
    return table
