"""The simulator against the naive machine, and the rules of the game one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from scrimp._simulate import simulate

from .machine import Machine
from .programs import random_decisions, random_trace, randoms


@settings(max_examples=3000)
@given(randoms)
def test_agrees_with_the_naive_machine(random: Random) -> None:
    """Levels at every moment, and seconds, are those of the machine that computes all from scratch."""
    trace = random_trace(random)
    decisions = random_decisions(random, trace)
    machine = Machine(trace, decisions).run()
    timeline = simulate(trace, decisions)
    assert timeline.levels.tolist() == machine.levels
    assert timeline.seconds == pytest.approx(machine.now)
