"""Plans: within the budget, above the bound, close to the best; and what is said when there is none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from scrimp._index import index
from scrimp._plan import Decision, Drop, Keep
from scrimp._simulate import simulate, simulate_index
from scrimp._solve import frontier, plan
from scrimp._solve._planner import Planner
from scrimp._trace import Trace
from scrimp.errors import BudgetError

from .models import Builder, chain, gpt, resnet, unet
from .programs import random_trace, randoms

MIB = 1 << 20
MODELS: list[Callable[[], Trace]] = [lambda: gpt(layers=3, vocabulary=4000), lambda: resnet(blocks=4), unet]


def every_plan(trace: Trace, passes: tuple[int, ...] = (0, 1), held: bool = False) -> list[tuple[int, float]]:
    """Peak and seconds of every plan of keeps and drops; if ``held``, with all choices of unsaved values to keep."""
    facts = index(trace)
    options: dict[int, list[Decision | None]] = {
        value: [Keep(), *map(Drop, passes)] if value in facts.droppable else [Keep()] for value in facts.decided
    }
    options |= {value: [None, Keep()] for value in sorted(facts.holdable) if held}
    found = []
    for choice in product(*options.values()):
        decisions = {value: one for value, one in zip(options, choice, strict=True) if one is not None}
        timeline = simulate(trace, decisions)
        found.append((timeline.peak, timeline.seconds))
    return found


@settings(max_examples=30, deadline=None)
@given(randoms)
def test_bound_holds_for_every_plan(random: Random) -> None:
    """No plan within a budget, of all that there are, is faster than the bound for that budget."""
    trace = random_trace(random, most_ops=5)
    facts = index(trace)
    if len(facts.droppable) + len(facts.holdable) > 6:
        return
    planner = Planner(trace)
    plans = every_plan(trace, held=True)
    for budget in {peak for peak, _ in plans}:
        best = min(seconds for peak, seconds in plans if peak <= budget)
        assert planner.bound(budget) <= best * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(randoms)
def test_small_programs_are_solved_to_the_best_single_level_plan(random: Random) -> None:
    """On tiny programs, a plan is found for every feasible budget, almost always the best of all."""
    trace = random_trace(random, most_ops=6)
    if len(index(trace).droppable) > 7:
        return
    planner = Planner(trace)
    plans = every_plan(trace, passes=(0,))
    budget = random.choice(sorted({peak for peak, _ in plans}))
    best = min(seconds for peak, seconds in plans if peak <= budget)
    solution = planner.solve(budget)
    assert solution is not None
    assert solution.seconds <= best * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: gpt(layers=1, vocabulary=8000), lambda: unet(depth=1)])
def test_a_block_is_solved_to_the_optimum(model: Callable[[], Trace]) -> None:
    """At nine budgets, the plan is as fast as the best of all single-level plans of the large values."""
    planner = Planner(model())
    facts = planner.facts
    large = [value for value in facts.droppable if facts.size[value] > planner.plain.peak // 20_000]
    plans = []
    for choice in product((False, True), repeat=len(large)):
        dropped = {value: Drop() for value, is_dropped in zip(large, choice, strict=True) if is_dropped}
        timeline = simulate_index(facts, dropped)
        plans.append((timeline.peak, timeline.seconds))
    least = min(peak for peak, _ in plans)
    for tenth in range(1, 10):
        budget = least + (planner.plain.peak - least) * tenth // 10
        best = min(seconds for peak, seconds in plans if peak <= budget)
        solution = planner.solve(budget)
        assert solution is not None
        assert solution.seconds <= best + 1e-3 * planner.plain.seconds


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fraction", [0.9, 0.8, 0.65])
def test_plan_keeps_its_word(model: Callable[[], Trace], fraction: float) -> None:
    """The simulator finds the plan's peak within the budget, and its predictions right."""
    trace = model()
    made = plan(trace, int(simulate(trace).peak * fraction))
    timeline = simulate(trace, made)
    assert timeline.peak == made.peak <= made.budget
    assert timeline.seconds == pytest.approx(made.seconds)
    assert made.bound_seconds <= made.seconds * (1 + 1e-9)


def test_no_pressure_no_replays() -> None:
    """A budget that the plain step meets drops nothing."""
    trace = MODELS[0]()
    made = plan(trace, simulate(trace).peak)
    assert set(made.decisions.values()) == {Keep()}
    assert made.added_seconds == 0


def test_planning_is_deterministic() -> None:
    """The same trace and budget give the same plan."""
    trace = unet()
    budget = int(simulate(trace).peak * 0.6)
    assert plan(trace, budget) == plan(trace, budget)


def test_frontier_is_monotone() -> None:
    """More bytes never cost more time, and every plan meets its budget."""
    plans = frontier(unet(), points=3)
    assert all(made.peak <= made.budget for made in plans)
    assert all(one.seconds >= other.seconds for one, other in pairwise(plans))
    assert plans[-1].added_seconds == 0


def test_error_names_the_smallest_budget_and_what_stands_there() -> None:
    """The budget that the error names works; the error says what is in the way."""
    trace = gpt(layers=2)
    with pytest.raises(BudgetError, match=r"log_softmax \(head\)") as caught:
        plan(trace, "1 MiB")
    assert caught.value.smallest is not None
    assert str(caught.value.smallest) in str(caught.value)
    assert plan(trace, caught.value.smallest).peak <= caught.value.smallest


@settings(max_examples=30, deadline=None)
@given(randoms)
def test_the_smallest_budget_of_an_error_works(random: Random) -> None:
    """Whatever budget an error names, planning for it succeeds."""
    trace = random_trace(random)
    with pytest.raises(BudgetError) as caught:
        plan(trace, 1)  # less than what is resident in every random trace
    assert caught.value.smallest is not None
    assert plan(trace, caught.value.smallest).peak <= caught.value.smallest


def test_a_frontier_needs_two_points() -> None:
    """Fewer are refused."""
    with pytest.raises(ValueError, match="two points"):
        frontier(chain(3), points=1)


def widening(blocks: int) -> Trace:
    """Blocks whose norms save a wider copy of their input, and nobody the input itself."""
    build = Builder()
    x = build.op("start", [], [MIB])[0]
    for _ in range(blocks):
        (wide,) = build.op("widen", [x], [2 * MIB], save_made=(0,))
        (inner,) = build.op("mm", [wide], [8 * MIB], save_made=(0,), flops=4e10)
        x = build.op("mm", [inner], [MIB], flops=4e10)[0]
    return build.trace()


def test_what_nobody_saves_is_kept_where_that_takes_less() -> None:
    """Blocks whose norms save a wider copy of their input keep the input, which autograd itself does not save."""
    trace = widening(12)
    facts = index(trace)
    inputs: dict[int, Decision] = dict.fromkeys(facts.droppable, Drop()) | dict.fromkeys(facts.holdable, Keep())
    by_hand = simulate(trace, inputs)
    made = plan(trace, by_hand.peak)
    assert facts.holdable & {value for value, decision in made.decisions.items() if decision == Keep()}
    assert made.peak == simulate(trace, made).peak <= made.budget
    assert made.seconds <= by_hand.seconds


def test_the_bound_holds_where_unsaved_values_pay() -> None:
    """No plan is faster than the bound, also where the fastest plans keep unsaved values."""
    trace = widening(3)
    planner, plans, saved = Planner(trace), every_plan(trace, (0,), held=True), every_plan(trace, (0,))
    paid = 0
    for budget in {peak for peak, _ in plans}:
        best, without = (min((s for peak, s in some if peak <= budget), default=np.inf) for some in (plans, saved))
        assert planner.bound(budget) <= best * (1 + 1e-6)
        paid += best < without
    assert paid
