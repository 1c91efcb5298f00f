"""The incremental state of a plan against the simulator."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from scrimp._index import Index, index
from scrimp._plan import Decision, Drop, Keep
from scrimp._simulate import simulate, simulate_index
from scrimp._solve._liveness import Liveness

from .programs import random_trace, randoms


def changes_of(random: Random, facts: Index) -> dict[int, Decision]:
    """New decisions for a few values."""
    chosen = random.sample(sorted(facts.droppable), random.randint(1, min(3, len(facts.droppable))))
    held = random.sample(sorted(facts.holdable), min(1, len(facts.holdable)))
    decisions: dict[int, Decision] = {value: random.choice([Keep(), Drop()]) for value in held}
    return decisions | {value: random.choice([Keep(), Drop(), Drop(), Drop(1), Drop(2)]) for value in chosen}


@settings(max_examples=300, deadline=None)
@given(randoms)
def test_agrees_with_the_simulator_after_every_change(random: Random) -> None:
    """After any sequence of changes, levels and seconds are those of the plan simulated from scratch."""
    trace = random_trace(random, most_ops=25)
    facts = index(trace)
    state = Liveness(facts, {})
    for _ in range(8 if facts.droppable else 0):
        state.decide_all(changes_of(random, facts))
        timeline = simulate(trace, state.decisions)
        assert state.levels.tolist() == timeline.levels.tolist()
        assert state.seconds == pytest.approx(timeline.seconds)


@settings(max_examples=200, deadline=None)
@given(randoms)
def test_changes_can_be_taken_back(random: Random) -> None:
    """A state that went back to a mark is what it was there, and goes on from it as if nothing had happened."""
    facts = index(random_trace(random, most_ops=25))
    state = Liveness(facts, {})
    for _ in range(4 if facts.droppable else 0):
        mark, decisions = state.mark(), state.decisions
        for _ in range(random.randint(1, 3)):
            state.decide_all(changes_of(random, facts))
        state.back_to(mark)
        assert state.decisions == decisions
        assert state.levels.tolist() == simulate_index(facts, decisions).levels.tolist()
        state.decide_all(changes_of(random, facts))
        timeline = simulate_index(facts, state.decisions)
        assert state.levels.tolist() == timeline.levels.tolist()
        assert state.seconds == pytest.approx(timeline.seconds)
