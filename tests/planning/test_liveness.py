"""The incremental state of a plan against the simulator."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from scrimp._index import index
from scrimp._plan import Drop, Keep
from scrimp._simulate import simulate
from scrimp._solve._liveness import Liveness

from .programs import random_trace, randoms


@settings(max_examples=300, deadline=None)
@given(randoms)
def test_agrees_with_the_simulator_after_every_change(random: Random) -> None:
    """After any sequence of changes, levels and seconds are those of the plan simulated from scratch."""
    trace = random_trace(random, most_ops=25)
    facts = index(trace)
    state = Liveness(facts, {})
    for _ in range(8 if facts.droppable else 0):
        chosen = random.sample(sorted(facts.droppable), random.randint(1, min(3, len(facts.droppable))))
        changes = {value: random.choice([Keep(), Drop(), Drop(), Drop(1), Drop(2)]) for value in chosen}
        state.decide_all(changes)
        timeline = simulate(trace, state.decisions)
        assert state.levels.tolist() == timeline.levels.tolist()
        assert state.seconds == pytest.approx(timeline.seconds)
