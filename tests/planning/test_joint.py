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
from scrimp._trace import Op, Release, Run, Trace, Unpack, Value
from scrimp.errors import BudgetError, PlanError

from .machine import Machine
from .models import gpt, resnet, unet
from .programs import random_trace, randoms

GIB = 1 << 30
LINK = 51 * GIB
PIECE = 4096  # what the smallest value takes of a store
LARGE = 2 * PIECE


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


@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "unet"))])
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
    trace = linked(gpt(layers=8, vocabulary=4000))
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
    assert 0 < taken(trace, plans[1]) <= GIB // 8 < taken(trace, plans[2]) <= GIB // 2


def test_host_and_disk_add_up() -> None:
    """A plan for both has the bytes of both."""
    plans = [plan(pressed(16.0), 2 * LARGE, host=LARGE, disk=tier) for tier in (None, LARGE)]
    assert [len(stored(made)) for made in plans] == [1, 2]
    assert plans[1] == plan(pressed(16.0), 2 * LARGE, host=2 * LARGE)


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
    made = plan(trace, int(simulate(trace).peak * 0.75), host="32GiB")
    facts = index(trace)
    early = sum(facts.saved_at[value] < len(trace.ops) / 2 for value in stored(made))
    assert 0 < early < len(stored(made))
    assert simulate(trace, made).stall_seconds < 0.01 * made.plain_seconds


def test_stored_values_come_back_when_a_session_can_see_it() -> None:
    """Copies back begin where backward unpacks a value that can be replayed: a session sees nothing else."""
    trace = linked(gpt(layers=8, vocabulary=4000))
    made = plan(trace, int(simulate(trace).peak * 0.7), host="32GiB")
    for value, decision in made.decisions.items():
        if isinstance(decision, Store) and index(trace).unpacks[value]:
            event = trace.events[decision.prefetch_at]
            assert isinstance(event, Unpack)
            made_by = trace.values[event.value].op
            assert made_by is not None
            assert trace.ops[made_by].replayable


def test_plans_allow_for_a_link_that_is_slower() -> None:
    """Copies go and come with as much slack as the budget has room for: a link that is a tenth slower costs nothing."""
    trace = linked(gpt(layers=8, vocabulary=4000))
    made = plan(trace, int(simulate(trace).peak * 0.75), host="32GiB")
    assert stored(made)
    slower = replace(trace, out_bandwidth=trace.out_bandwidth * 0.9, in_bandwidth=trace.in_bandwidth * 0.9)
    assert simulate(slower, made).seconds == pytest.approx(made.seconds)


def test_a_trace_without_bandwidths_is_refused() -> None:
    """Planning with a store needs to know how fast it is."""
    with pytest.raises(PlanError, match="out_bandwidth"):
        plan(linked(unet(), bandwidth=0.0), "8GiB", host="32GiB")


def test_joint_planning_is_deterministic() -> None:
    """The same arguments give the same plan."""
    trace = pressed(2.0)
    assert plan(trace, 2 * LARGE, host="8GiB") == plan(trace, 2 * LARGE, host="8GiB")


@pytest.mark.slow
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
    capacity = random.choice((PIECE, 2 * PIECE, 1 << 20))
    offload = Offload(facts, drops, capacity)
    for budget in range(5, simulate(trace, drops).peak + 1):
        decisions = offload.within(budget)
        if decisions is not None:
            assert simulate(trace, decisions).peak <= budget
            assert PIECE * sum(isinstance(one, Store) for one in decisions.values()) <= capacity


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


@settings(max_examples=150, deadline=None)
@given(randoms)
def test_the_joint_bound_holds_for_every_plan(random: Random) -> None:
    """No plan with stores, of all that there are, is faster than the bound for its budget."""
    trace = random_trace(random, most_ops=3)
    trace = linked(trace, bandwidth=random.choice((0.5, 2.0)))
    facts = index(trace)
    stores = (len(trace.ops) * len(trace.events) + 2) ** len(facts.decided)
    if not facts.decided or stores > 5000:
        return
    planner = JointPlanner(Planner(trace), capacity=1 << 20)
    plans = list(every_plan(facts))
    for budget in {peak for peak, _ in plans}:
        best = min(seconds for peak, seconds in plans if peak <= budget)
        assert planner.bound(budget) <= best * (1 + 1e-6)


def pressed(bandwidth: float) -> Trace:
    """Two large values wait for backward while a long op needs room; both take long to compute again."""
    values = (Value(1, None), Value(LARGE, 0, dies_after=1), Value(LARGE, 1, dies_after=1))
    ops = (
        *(Op("one", "", (0,), (1,), 6.0), Op("two", "", (1,), (2,), 6.0)),
        *(Op("long", "", (0,), (), 4.0), Op("wide", "", (0,), (), 1.0, transient=LARGE * 3 // 2)),
    )
    events = (
        *(Run("head", "", 4.0, 0, 0), Unpack(2), Run("two", "", 2.0, 0, 0), Release(2)),
        *(Unpack(1), Run("one", "", 2.0, 0, 0), Release(1)),
    )
    return linked(Trace(values, ops, events), bandwidth * LARGE / 8)


@pytest.mark.parametrize("bandwidth", [0.5, 1.0, 1.5, 2.0, 4.0, 16.0])
def test_where_stores_pay_the_bound_holds(bandwidth: float) -> None:
    """For a step that gains from its store, the bound is below the best of all plans, and the plan found is close."""
    trace = pressed(bandwidth)
    planner = JointPlanner(Planner(trace), capacity=1 << 20)
    plans = list(every_plan(index(trace)))
    for budget in {peak for peak, _ in plans}:
        best = min(seconds for peak, seconds in plans if peak <= budget)
        found = planner.solve(budget)
        assert planner.bound(budget) <= best * (1 + 1e-6)
        assert found is not None
        assert found.seconds <= best * 1.25
