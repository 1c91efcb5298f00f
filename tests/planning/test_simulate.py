"""The simulator against the naive machine, and the rules of the game one by one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from scrimp._plan import Drop, Plan, Store
from scrimp._simulate import simulate
from scrimp._standing import standing
from scrimp._trace import Op, Release, Run, Trace, Unpack, Value
from scrimp.errors import PlanError

from .machine import Machine
from .programs import random_decisions, random_trace, randoms


@settings(max_examples=150, deadline=None)
@given(randoms)
def test_agrees_with_the_naive_machine(random: Random) -> None:
    """Levels at every moment, and seconds, are those of the machine that computes all from scratch."""
    trace = random_trace(random)
    decisions = random_decisions(random, trace)
    machine = Machine(trace, decisions).run()
    timeline = simulate(trace, decisions)
    assert timeline.levels.tolist() == machine.levels
    assert timeline.seconds == pytest.approx(machine.now)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(randoms)
def test_agrees_with_the_naive_machine_on_many(random: Random) -> None:
    """The same over many more programs."""
    trace = random_trace(random, most_ops=15)
    decisions = random_decisions(random, trace)
    machine = Machine(trace, decisions).run()
    timeline = simulate(trace, decisions)
    assert timeline.levels.tolist() == machine.levels
    assert timeline.seconds == pytest.approx(machine.now)


@settings(max_examples=50)
@given(randoms)
def test_standing_adds_up_to_the_level(random: Random) -> None:
    """At every moment, the parts by name sum to the simulated level."""
    trace = random_trace(random)
    timeline = simulate(trace, random_decisions(random, trace))
    for moment, level in enumerate(timeline.levels.tolist()):
        assert sum(part.nbytes for part in standing(trace, timeline, moment)) == level


def _chain(bandwidth: float = 0.0) -> Trace:
    """Three ops of one second and 10 bytes each; each saves what it makes."""
    values = (Value(10, None), *(Value(10, op, dies_after=min(op + 1, 2)) for op in range(3)))
    ops = tuple(Op(f"op{op}", "", (op,), (op + 1,), 1.0) for op in range(3))
    events = tuple(
        event for value in (3, 2, 1) for event in (Unpack(value), Run(f"d{value}", "", 1.0, 0, 0), Release(value))
    )
    return Trace(values, ops, events, (), bandwidth, bandwidth)


def test_keeping_everything_adds_nothing() -> None:
    """Without a plan, the peak is all that is saved and the time that of the ops and nodes."""
    timeline = simulate(_chain())
    assert (timeline.peak, timeline.seconds, timeline.replay_seconds) == (30, 6.0, 0.0)


def test_a_replay_retains_what_backward_will_ask_for() -> None:
    """Dropping 2 and 3 replays both at the unpack of 3; the unpack of 2 finds it."""
    timeline = simulate(_chain(), {2: Drop(), 3: Drop()})
    assert timeline.replay_seconds == 2.0
    assert timeline.levels.tolist() == [10, 20, 30, 30, 30, 30, 20, 20, 20, 10, 10, 10]


def test_passes_let_a_value_go_again() -> None:
    """With one pass, the replay of 3 lets 2 go, and the unpack of 2 replays it once more."""
    timeline = simulate(_chain(), {2: Drop(passes=1), 3: Drop()})
    assert timeline.replay_seconds == 3.0
    assert timeline.levels.tolist()[4] == 20


def test_a_kept_value_outlives_its_handle_while_replays_start_from_it() -> None:
    """A value that autograd released first stays until the dropped value made from it is released."""
    trace = _chain()
    first, rest = trace.events[6:], trace.events[:6]
    reordered = Trace(trace.values, trace.ops, (*first, *rest))
    assert simulate(reordered, {2: Drop(), 3: Drop()}).levels.tolist()[6] == 10 + 20


def test_storing_waits_for_the_copies() -> None:
    """A copy that takes longer than the compute beside it stalls the step by the difference."""
    timeline = simulate(_chain(bandwidth=5.0), {1: Store(free_at=1, prefetch_at=6)})
    assert timeline.stall_seconds == pytest.approx(1.0 + 2.0)
    assert timeline.levels.tolist()[2:6] == [20, 20, 20, 20]


@pytest.mark.parametrize("decisions", [{0: Drop()}, {9: Drop()}, {1: Drop(-1)}, {1: Store(0, 0)}])
def test_impossible_decisions_are_refused(decisions: dict[int, Drop | Store]) -> None:
    """Values from before the step, unknown values, negative passes, a store without bandwidth."""
    with pytest.raises(PlanError):
        simulate(_chain(), decisions)


def test_what_cannot_be_replayed_cannot_be_dropped() -> None:
    """An op that is not replayable makes values that plans must keep."""
    trace = _chain()
    opaque = Op("op1", "", (1,), (2,), 1.0, replayable=False)
    with pytest.raises(PlanError, match="replayable"):
        simulate(Trace(trace.values, (trace.ops[0], opaque, trace.ops[2]), trace.events), {2: Drop()})


def test_a_plan_for_another_trace_is_refused() -> None:
    """The fingerprint tells."""
    with pytest.raises(PlanError, match="is for trace"):
        simulate(_chain(), Plan("other", 1, {}, 1, 1.0, 1.0, 1.0))
