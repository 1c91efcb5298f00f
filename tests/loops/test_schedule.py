"""Schedules are optimal, and an abstract machine can follow them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest

from scrimp._loops.schedule import (
    Action,
    Advance,
    Drop,
    Load,
    Online,
    Reverse,
    Save,
    advances,
    backward,
    repeats,
    slots_for,
    split,
    sweep,
)


class Machine:
    """Follows a schedule; raises where it asks for what is not there. Counts what matters."""

    def __init__(self, steps: int, saved: Iterable[int], slots: int, held: int | None) -> None:
        self.saved = set(saved)
        self.current = held
        self.to_reverse = steps
        self.slots = slots
        self.advanced = [0] * steps

    def follow(self, actions: Iterable[Action]) -> Machine:
        """Do what the schedule says, and make sure that it does all."""
        for action in actions:
            match action:
                case Load(step):
                    assert step in self.saved
                    self.current = step
                case Advance(start, stop):
                    assert self.current == start < stop
                    self.current = stop
                    for step in range(start, stop):
                        self.advanced[step] += 1
                case Save(step):
                    assert self.current == step not in self.saved
                    self.saved.add(step)
                    assert len(self.saved) <= self.slots
                case Reverse(step):
                    assert self.current == step == self.to_reverse - 1
                    self.to_reverse = step
                    self.current = None
                case Drop(step):
                    self.saved.remove(step)
        assert self.to_reverse == 0
        assert not self.saved
        return self


def followed(steps: int, slots: int) -> Machine:
    """The schedule of a loop of known length, with the first sweep."""
    saved = list(sweep(steps, slots))
    assert saved[0] == 0
    assert len(saved) <= slots
    return Machine(steps, saved, slots, steps - 1).follow(backward(steps, saved, slots, steps - 1))


@functools.cache
def fewest(steps: int, slots: int) -> int:
    """The optimum by its definition, trying every place for the next state to save."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(at + fewest(steps - at, slots - 1) + fewest(at, slots) for at in range(1, steps))


@functools.cache
def planned(steps: int, slots: int) -> int:
    """What the schedule's own choice of places costs."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    at = split(steps, slots)
    return at + planned(steps - at, slots - 1) + planned(at, slots)


def test_a_machine_refuses_a_wrong_schedule() -> None:
    """It notices a state that is not there, a step out of order, and a step that is left."""
    for wrong in ([Load(1)], [Load(0), Reverse(0)], [Load(0), Advance(0, 1), Reverse(1)], [Advance(1, 2)]):
        with pytest.raises(AssertionError):
            Machine(2, [0], 1, None).follow(wrong)


def test_the_closed_form_is_the_optimum() -> None:
    """The known formula agrees with the definition of the optimum."""
    for steps in range(1, 41):
        for slots in range(1, 12):
            assert advances(steps, slots) == fewest(steps, slots)


def test_step_counts_are_optimal_for_every_length_and_number_of_slots() -> None:
    """The places that the schedule chooses cost what the formula says, up to 200 by 200."""
    for steps in range(1, 201):
        for slots in range(1, 201):
            assert planned(steps, slots) == advances(steps, slots)


@pytest.mark.parametrize(
    ("lengths", "numbers"),
    [
        (range(1, 60, 4), range(1, 40, 3)),
        pytest.param(range(1, 201, 3), [*range(1, 40), 60, 120, 199], marks=pytest.mark.slow),
    ],
    ids=["some", "many up to 200"],
)
def test_a_machine_can_follow(lengths: range, numbers: range) -> None:
    """The actions do what the counts promise, within the slots."""
    for steps in lengths:
        for slots in numbers:
            machine = followed(steps, slots)
            assert sum(machine.advanced) + steps - 1 == advances(steps, slots)
            assert max(machine.advanced) < max(repeats(steps, slots), 1)


@pytest.mark.slow
def test_step_counts_are_those_of_checkpoint_schedules_for_every_length_and_number_of_slots() -> None:
    """The optimum that another implementation finds, up to 200 by 200."""
    multistage = pytest.importorskip("checkpoint_schedules.multistage")
    for slots in range(1, 201):
        for steps in range(1, 201):
            if slots < steps or steps == 1:
                assert advances(steps, slots) == multistage.optimal_extra_steps(steps, min(slots, steps - 1))
            else:
                assert advances(steps, slots) == steps - 1


@pytest.mark.slow
def test_schedules_are_those_of_checkpoint_schedules() -> None:
    """Another implementation of Revolve runs as many steps."""
    schedules = pytest.importorskip("checkpoint_schedules")
    for steps in range(1, 201, 46):
        for slots in range(1, 60, 8):
            theirs = schedules.Revolve(steps, min(slots, max(steps - 1, 1)))
            forward = 0
            for action in theirs:
                if isinstance(action, schedules.Forward):
                    forward += action.n1 - action.n0
                elif isinstance(action, schedules.EndReverse):
                    break
            assert advances(steps, min(slots, max(steps - 1, 1))) + steps == forward


def test_slots_for_is_the_fewest() -> None:
    """One state less would not do."""
    for steps in range(2, 300):
        for times in range(1, 5):
            slots = slots_for(steps, times)
            assert repeats(steps, slots) <= times
            assert slots == 1 or repeats(steps, slots - 1) > times


def test_an_unknown_length_costs_little_more() -> None:
    """No step is advanced over more often than if the length were known, and all together 1.4 times at most."""
    for slots in range(1, 40, 4):
        online = Online(slots)
        for steps in range(1, 200):
            if steps > 1:
                online.arrive(steps - 1)
            saved = online.saved
            assert len(saved) <= slots + 1
            machine = Machine(steps, saved, slots + 1, None)
            machine.follow(backward(steps, saved, max(slots, len(saved)), None))
            assert sum(machine.advanced) + steps - 1 <= 1.4 * max(advances(steps, slots), 1)
            assert max(machine.advanced) + 1 <= max(repeats(steps, slots), 1)
