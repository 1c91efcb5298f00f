"""What joint plans promise: keep, recompute and store, beside keep and recompute alone. Nothing is measured.

Run: python benchmarks/joint.py [--model llama] [--machine H200] [--host 32GiB]

The step is followed on descriptions, with times from a roofline of the machine and of its link (51 GiB/s each way on an
H200). Every number is the simulator's: a prediction, to be compared with what a GPU measures (benchmarks/offload.py).
Gibibytes are those above parameters, buffers and inputs; percentages are of the plain step's time.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

import scrimp
from models import MODELS
from scrimp import BudgetError, Plan
from scrimp._budget import parse_budget
from scrimp.planning import Store, Trace, simulate

GIB = 1 << 30
BUDGETS = (20.0, 15.5, 12.3, 9.2, 7.9, 7.1, 6.5)


def planned(trace: Trace, budget: int, host: str | None) -> Plan | None:
    """A plan, or nothing where there is none."""
    try:
        return scrimp.plan(trace, budget, host=host)
    except BudgetError:
        return None


def cells(trace: Trace, made: Plan | None) -> list[str]:
    """Added time, its proven lower bound, bytes stored, and time waited."""
    if made is None:
        return ["-"] * 4
    away = sum(trace.values[value].nbytes for value, one in made.decisions.items() if isinstance(one, Store))
    added, least = (seconds / made.plain_seconds - 1 for seconds in (made.seconds, made.bound_seconds))
    waited = simulate(trace, made).stall_seconds / made.plain_seconds
    return [f"{added:+.1%}", f"{least:+.1%}", f"{away / GIB:.2f}", f"{waited:.1%}"]


def main() -> None:
    """Print a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama", choices=sorted(MODELS))
    parser.add_argument("--machine", default="H200")
    parser.add_argument("--host", default="32GiB")
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS, help="GiB above what stands before")
    arguments = parser.parse_args()
    parse_budget(arguments.host)
    model, make_batch = MODELS[arguments.model](tiny=False, device="meta")
    trace = scrimp.trace_on(arguments.machine, model, *make_batch())
    plain, before = simulate(trace), sum(part.nbytes for part in trace.resident)
    print(
        f"{arguments.model} on {arguments.machine}, {len(trace.ops)} operators, {trace.out_bandwidth / GIB:.0f} GiB/s; "
        f"plain: {(plain.peak - before) / GIB:.1f} GiB, {plain.seconds * 1e3:.0f} ms. Predicted, not measured"
    )
    table = Table("GiB", "keep, recompute", "no plan below", "and store", "no plan below", "GiB stored", "waited")
    for budget in arguments.budgets:
        nbytes = int(budget * GIB) + before
        alone = cells(trace, planned(trace, nbytes, None))
        table.add_row(f"{budget:g}", *alone[:2], *cells(trace, planned(trace, nbytes, arguments.host)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
