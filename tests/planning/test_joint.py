"""Plans that keep, recompute and store: within budget and store, never slower than without one, above a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings

from scrimp._index import Index, index
from scrimp._pieces import pieces_for
from scrimp._plan import Decision, Drop, Keep, Plan, Store
from scrimp._simulate import simulate
from scrimp._solve import frontier, plan
from scrimp._solve._joint import JointPlanner
from scrimp._solve._offload import Offload
from scrimp._solve._planner import Planner
from scrimp._trace import Trace
from scrimp.errors import BudgetError, PlanError

from .machine import Machine
from .models import gpt, resnet, unet
from .programs import random_trace, randoms

GIB = 1 << 30
LINK = 51 * GIB


def linked(trace: Trace, bandwidth: float = LINK) -> Trace:
    """The trace, with a store."""
    return replace(trace, out_bandwidth=bandwidth, in_bandwidth=bandwidth)


def stored(made: Plan) -> list[int]:
    """The values that a plan stores."""
    return [value for value, decision in made.decisions.items() if isinstance(decision, Store)]


def taken(trace: Trace, made: Plan) -> int:
    """What a plan takes of the store."""
    return sum(sum(pieces_for(trace.values[value].nbytes)) for value in stored(made))


MODELS = {"gpt": lambda: gpt(layers=2, vocabulary=2000), "resnet": lambda: resnet(blocks=4), "unet": unet}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fraction", [0.85, 0.6])
def test_a_store_makes_no_plan_slower(name: str, fraction: float) -> None:
    """At each budget the joint plan keeps its word, and takes no longer than the plan of keeps and drops."""
    trace = linked(MODELS[name]())
    budget = int(simulate(trace).peak * fraction)
    made = plan(trace, budget, host="32GiB")
    timeline = simulate(trace, made)
    assert timeline.peak == made.peak <= budget
    assert timeline.seconds == pytest.approx(made.seconds)
    assert made.bound_seconds <= made.seconds <= plan(trace, budget).seconds


def test_a_fast_link_replaces_replays() -> None:
    """Where the link moves much of what is over the budget in time, most of the replays' seconds are saved."""
    trace = linked(gpt(layers=8, vocabulary=4000), bandwidth=2 * LINK)
    budget = int(simulate(trace).peak * 0.65)
    alone, joint = plan(trace, budget), plan(trace, budget, host="32GiB")
    assert stored(joint)
    assert joint.added_seconds < alone.added_seconds / 2


def test_a_slow_link_is_left_alone() -> None:
    """A store that is slower than every replay changes nothing."""
    trace = linked(unet(), bandwidth=1e3)
    budget = int(simulate(trace).peak * 0.7)
    assert plan(trace, budget, host="32GiB").decisions == plan(trace, budget).decisions


def test_the_host_holds_what_is_stored() -> None:
    """However small its limit, no more is stored than it takes; without room for anything, nothing is."""
    trace = linked(gpt(layers=6, vocabulary=4000))
    budget = int(simulate(trace).peak * 0.8)
    plans = [plan(trace, budget, host=limit) for limit in (1, GIB // 8, GIB // 2)]
    assert not stored(plans[0])
    assert [taken(trace, made) <= limit for made, limit in zip(plans[1:], (GIB // 8, GIB // 2), strict=True)]
    assert 0 < taken(trace, plans[1]) <= GIB // 8 < taken(trace, plans[2]) <= GIB // 2


def test_host_and_disk_add_up() -> None:
    """A plan for both has the bytes of both."""
    trace = linked(gpt(layers=3, vocabulary=4000))
    budget = int(simulate(trace).peak * 0.8)
    half = GIB // 8
    assert plan(trace, budget, host=half, disk=half) == plan(trace, budget, host=2 * half)


def test_a_store_makes_room_below_what_replays_reach() -> None:
    """A budget that no plan of keeps and drops meets can be met by sending away what cannot be replayed."""
    trace = gpt(layers=4, vocabulary=4000)
    trace = linked(replace(trace, ops=tuple(replace(op, replayable=False) for op in trace.ops)))
    budget = int(simulate(trace).peak * 0.8)
    with pytest.raises(BudgetError):
        plan(trace, budget)
    assert plan(trace, budget, host="8GiB").peak <= budget


def test_copies_of_equal_layers_are_spread_over_the_step() -> None:
    """No half of the forward pass has all of the stores."""
    trace = linked(gpt(layers=8, vocabulary=4000))
    made = plan(trace, int(simulate(trace).peak * 0.85), host="32GiB")
    facts = index(trace)
    early = sum(facts.saved_at[value] < len(trace.ops) / 2 for value in stored(made))
    assert 0 < early < len(stored(made))
    assert simulate(trace, made).stall_seconds < 0.01 * made.plain_seconds


def test_a_trace_without_bandwidths_is_refused() -> None:
    """Planning with a store needs to know how fast it is."""
    with pytest.raises(PlanError, match="out_bandwidth"):
        plan(linked(unet(), bandwidth=0.0), "8GiB", host="32GiB")


def test_joint_planning_is_deterministic() -> None:
    """The same arguments give the same plan."""
    trace = linked(gpt(layers=1, vocabulary=2000))
    budget = int(simulate(trace).peak * 0.7)
    assert plan(trace, budget, host="8GiB") == plan(trace, budget, host="8GiB")


def test_the_joint_frontier_lies_below_the_other() -> None:
    """It is monotone, and at none of the other's budgets slower."""
    trace = linked(gpt(layers=1, vocabulary=2000))
    joint, alone = frontier(trace, points=3, host="8GiB"), frontier(trace, points=3)
    assert all(one.seconds >= other.seconds for one, other in pairwise(joint))
    assert joint[0].peak <= alone[0].peak
    for made in alone:
        assert plan(trace, made.budget, host="8GiB").seconds <= made.seconds


@settings(max_examples=40, deadline=None)
@given(randoms)
def test_random_programs_meet_their_budgets(random: Random) -> None:
    """Whatever the program, the naive machine finds a joint plan within its budget and as fast as it says."""
    trace = replace(random_trace(random), out_bandwidth=2.0, in_bandwidth=3.0)
    planner = JointPlanner(Planner(trace), capacity=1 << 20)
    budget = random.randint(5, planner.plain.peak)
    solution = planner.solve(budget)
    if solution is not None:
        machine = Machine(trace, solution.decisions).run()
        assert max(machine.levels) == solution.peak <= budget
        assert machine.now == pytest.approx(solution.seconds)


@settings(max_examples=60, deadline=None)
@given(randoms)
def test_stores_are_placed_where_they_are_simulated(random: Random) -> None:
    """Added to any plan of keeps and drops, stores bring its peak under the budget that they were asked for."""
    trace = replace(random_trace(random), out_bandwidth=2.0, in_bandwidth=3.0)
    facts = index(trace)
    drops: dict[int, Decision] = {
        value: Drop(random.randint(0, 2))
        for value in facts.decided
        if value in facts.droppable and random.random() < 0.4
    }
    budget = random.randint(5, simulate(trace, drops).peak)
    decisions = Offload(facts, drops, capacity=1 << 20).within(budget)
    if decisions is not None:
        assert simulate(trace, decisions).peak <= budget


def every_plan(facts: Index) -> Iterator[tuple[int, float]]:
    """Peak and seconds of every plan of keeps, drops and stores."""
    trace = facts.trace
    options: list[list[Decision]] = []
    for value in facts.decided:
        frees = range(facts.saved_at[value], len(trace.ops))
        stores = [Store(free, fetch) for free in frees for fetch in range(len(trace.events))]
        options.append([Keep(), *([Drop()] if value in facts.droppable else []), *stores])
    for choice in product(*options):
        timeline = simulate(trace, dict(zip(facts.decided, choice, strict=True)))
        yield timeline.peak, timeline.seconds


@settings(max_examples=60, deadline=None)
@given(randoms)
def test_the_joint_bound_holds_for_every_plan(random: Random) -> None:
    """No plan with stores, of all that there are, is faster than the bound for its budget."""
    bandwidth = random.choice((0.5, 2.0, 8.0))
    trace = linked(random_trace(random, most_ops=4), bandwidth)
    facts = index(trace)
    if not 0 < len(facts.decided) <= 2 or len(trace.events) > 10:
        return
    planner = JointPlanner(Planner(trace), capacity=1 << 20)
    plans = list(every_plan(facts))
    for budget in {peak for peak, _ in plans}:
        best = min(seconds for peak, seconds in plans if peak <= budget)
        assert planner.bound(budget) <= best * (1 + 1e-6)
