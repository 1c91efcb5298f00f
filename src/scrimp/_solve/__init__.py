"""From a trace and a budget to a plan: the solvers, and the two functions that people call."""

from __future__ import annotations

from .._budget import Budget, format_bytes, parse_budget
from .._plan import Plan
from .._simulate import simulate_index
from .._standing import lines_of, name_moment, standing
from .._trace import Trace
from ..errors import BudgetError, PlanError
from ._joint import JointPlanner
from ._planner import Planner, Solution

__all__ = ["frontier", "plan"]


def plan(trace: Trace, budget: Budget, *, host: Budget | None = None, disk: Budget | None = None) -> Plan:
    """The fastest plan found whose peak, at every moment of the step, is within the budget.

    Values are kept, or dropped and replayed; with ``host`` or ``disk`` they may also wait in a store. A plan with
    a store is never slower than the one without.

    Args:
        trace: the step to plan.
        budget: bytes that the whole step may use, parameters and gradients included: ``"8GiB"``, ``"8 GB"``
            or an int.
        host: bytes of host memory that stored values may take; None: none. The link to it has the bandwidths of
            the trace.
        disk: bytes of files that they may take beyond that. The bandwidths of the trace are then those of both
            together.

    Raises:
        PlanError: when values may be stored, and the trace has no bandwidths.
        BudgetError: when no plan within the budget was found; it names the smallest budget that works,
            and what stands at its peak.

    Example:
        >>> from scrimp._trace import Op, Release, Run, Trace, Unpack, Value
        >>> trace = Trace(
        ...     values=(Value(8, op=None), Value(800, op=0, dies_after=1), Value(800, op=1, dies_after=1)),
        ...     ops=(Op("exp", "", (0,), (1,), 1.0), Op("sin", "", (1,), (2,), 1.0)),
        ...     events=(
        ...         *(Unpack(2), Run("b", "", 1.0, 0, 0), Release(2)),
        ...         *(Unpack(1), Run("a", "", 1.0, 0, 0), Release(1)),
        ...     ),
        ... )
        >>> print(plan(trace, "2 kB"))
        peak 1.56 KiB of 1.95 KiB, time +0.0% (no plan below +0.0%); 2 kept, 0 dropped, 0 stored
    """
    nbytes = parse_budget(budget)
    planner = _planner(trace, host, disk)
    solution = planner.solve(nbytes)
    if solution is None:
        solution = planner.smallest()
        if solution.peak > nbytes:
            raise _infeasible(planner, solution, nbytes)
        solution = planner.polished(solution, nbytes)
    return _plan(planner, solution, nbytes)


def frontier(
    trace: Trace, points: int = 12, *, host: Budget | None = None, disk: Budget | None = None
) -> tuple[Plan, ...]:
    """Peak against time: plans for budgets from the smallest feasible one to what keeping everything takes.

    Args:
        trace: the step to plan.
        points: how many budgets, at least two, evenly spaced by ratio.
        host: as for :func:`plan`.
        disk: as for :func:`plan`.

    Returns:
        The plans, by increasing budget; a larger budget never takes more time.

    Example:
        >>> from scrimp._trace import Op, Release, Run, Trace, Unpack, Value
        >>> trace = Trace(
        ...     values=(Value(8, op=None), Value(8, op=0, dies_after=0)),
        ...     ops=(Op("exp", "", (0,), (1,), 1.0), Op("sin", "", (0,), (), 1.0, transient=4)),
        ...     events=(Unpack(1), Run("a", "", 1.0, 2, 0), Release(1)),
        ... )
        >>> [(step.peak, step.seconds) for step in frontier(trace, points=2)]
        [(10, 4.0), (12, 3.0)]
    """
    if points < 2:
        raise ValueError(f"A frontier needs at least two points; got points={points}.")
    planner = _planner(trace, host, disk)
    best = planner.smallest()
    largest = planner.plain.peak
    ratio = (largest / best.peak) ** (1 / (points - 1)) if best.peak else 1.0
    budgets = [round(best.peak * ratio**step) for step in range(points - 1)] + [largest]
    plans = []
    for budget in budgets:
        solution = planner.solve(budget)
        if solution is not None and solution.seconds < best.seconds:
            best = solution
        plans.append(_plan(planner, best, budget))
    return tuple(plans)


def _planner(trace: Trace, host: Budget | None, disk: Budget | None) -> Planner | JointPlanner:
    """What solves the trace, with as many bytes of stores as there are."""
    capacity = sum(parse_budget(tier) for tier in (host, disk) if tier is not None)
    if not capacity:
        return Planner(trace)
    if not trace.out_bandwidth or not trace.in_bandwidth:
        raise PlanError(
            "need to know how fast a store is to plan with one, have a trace without bandwidths. Give it what was "
            "measured: dataclasses.replace(trace, out_bandwidth=25e9, in_bandwidth=25e9), in bytes per second."
        )
    return JointPlanner(Planner(trace), capacity)


def _plan(planner: Planner | JointPlanner, solution: Solution, budget: int) -> Plan:
    return Plan(
        fingerprint=planner.facts.trace.fingerprint(),
        budget=budget,
        decisions=solution.decisions,
        peak=solution.peak,
        seconds=solution.seconds,
        plain_seconds=planner.plain.seconds,
        bound_seconds=min(planner.bound(budget), solution.seconds),
    )


def _infeasible(planner: Planner | JointPlanner, smallest: Solution, budget: int) -> BudgetError:
    trace = planner.facts.trace
    timeline = simulate_index(planner.facts, smallest.decisions)
    moment = timeline.peak_moment
    slower = smallest.seconds / planner.plain.seconds - 1
    named = lines_of(standing(trace, timeline, moment))
    return BudgetError(
        f"No plan fits this step into {format_bytes(budget)}. The smallest budget found to work is "
        f"{format_bytes(smallest.peak)} ({smallest.peak} bytes), {slower:+.0%} time. "
        f"At its peak ({name_moment(trace, moment)}) there are:\n" + named + "\n"
        "Give at least that budget, or make the step smaller: the batch, the inputs, a loss in chunks.",
        smallest=smallest.peak,
    )
