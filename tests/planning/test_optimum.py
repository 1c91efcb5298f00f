"""Plans against CP-SAT's, on small steps of real models."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from optimum import optimum, trace_of
from scrimp._index import index
from scrimp._solve import plan
from scrimp._solve._planner import Planner

from .programs import random_trace, randoms
from .test_solve import every_plan


@settings(max_examples=30, deadline=None)
@given(randoms)
def test_the_oracle_finds_the_best_of_all_plans(random: Random) -> None:
    """On tiny programs CP-SAT's optimum is that of every plan of keeps and single drops, tried one by one."""
    trace = random_trace(random, most_ops=8)
    if len(index(trace).droppable) > 7:
        return
    plans = every_plan(trace, passes=(0,))
    budget = random.choice(sorted({peak for peak, _ in plans}))
    found = optimum(trace, budget, workers=1)
    assert found.proven
    assert found.seconds == pytest.approx(min(seconds for peak, seconds in plans if peak <= budget), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "resnet", "unet", "lstm"])
def test_no_single_level_plan_is_a_point_faster(name: str) -> None:
    """At two budgets, what CP-SAT finds in some seconds is at most a point faster, and not below the bound."""
    trace = trace_of(name)
    planner = Planner(trace)
    smallest, plain = planner.smallest(), planner.plain
    for share in (0.3, 0.6):
        made = plan(trace, int(smallest.peak + share * (plain.peak - smallest.peak)))
        found = optimum(trace, made.budget, limit=4.0, hint=made.decisions)
        assert made.seconds <= found.seconds + 0.01 * plain.seconds
        assert made.bound_seconds <= found.seconds * (1 + 1e-6)
