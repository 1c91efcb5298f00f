"""Which states of a loop are kept, and in which order its steps are run again. Plain data: no torch here.

State ``k`` is the state before step ``k``. A loop of ``n`` steps is run once, and some of its states are saved on the
way. Then its steps are reversed, the last first, which needs state ``n - 1``, then ``n - 2``, and so on; a state that
is not saved is had back by advancing from the nearest one before it. The fewest steps are run by Revolve (Griewank and
Walther, 2000): with ``s`` states saved at most, the first among them, ``C(s + r, s)`` steps can be reversed such that
none is advanced over more than ``r`` times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Load:
    """Make a saved state the current one; it stays saved."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class Advance:
    """Run steps ``start`` to ``stop - 1``, from the current state, which is ``start``, to state ``stop``."""

    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class Save:
    """Save the current state, which is ``step``."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class Reverse:
    """Run a step from the current state once more, and backpropagate through it."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a saved state."""

    step: int


Action: TypeAlias = Load | Advance | Save | Reverse | Drop


def reach(slots: int, repeats: int) -> int:
    """Return how many steps ``slots`` states can reverse with none advanced over more than ``repeats`` times."""
    return math.comb(slots + repeats, slots) if repeats >= 0 else 0


@functools.lru_cache(maxsize=4096)
def repeats(steps: int, slots: int) -> int:
    """Return how often a step must be advanced over, at most, to reverse ``steps`` from ``slots`` states."""
    found, within = 0, 1
    while within < steps:
        found += 1
        within = within * (slots + found) // found  # reach(slots, found)
    return found


def advances(steps: int, slots: int) -> int:
    """Return the fewest steps that must be advanced over to reverse ``steps``, the first sweep to the last included.

    >>> advances(50, 7)  # and 50 more to reverse them
    105
    """
    most = repeats(steps, slots)
    return most * steps - math.comb(slots + most, slots + 1)


def slots_for(steps: int, times: int) -> int:
    """Return how many states let ``steps`` be reversed with no step advanced over more than ``times`` times.

    >>> slots_for(10_000, 2)
    140
    """
    slots = 1
    while reach(slots, times) < steps:
        slots *= 2
    low = slots // 2
    while slots - low > 1:
        middle = (low + slots) // 2
        low, slots = (low, middle) if reach(middle, times) >= steps else (middle, slots)
    return slots


@functools.lru_cache(maxsize=4096)
def split(steps: int, slots: int) -> int:
    """Return where to save next, counted from a saved state that ``steps`` steps follow; it is one of the ``slots``."""
    most = repeats(steps, slots)
    # Every position between two bounds is optimal; the later one leaves the shorter way to go with one state less.
    return max(1, min(reach(slots, most - 1), steps - reach(slots - 1, most - 1)))


def sweep(steps: int, slots: int) -> Iterator[int]:
    """Yield the states to save on the first way through a loop of known length, beginning with 0."""
    at = 0
    yield at
    for free in range(slots - 1, 0, -1):
        if steps - at > 1:
            at += split(steps - at, free + 1)
        if steps - at <= 1:
            return  # where the sweep ends, the state is at hand
        yield at


def backward(steps: int, saved: Sequence[int], slots: int, held: int | None = None) -> Iterator[Action]:
    """Yield what reverses the steps of a loop whose states ``saved`` are saved.

    Args:
        steps: how many steps the loop had.
        saved: the saved states, ascending, beginning with 0.
        slots: how many states may be saved at a time.
        held: a state that is the current one at the start.

    >>> for action in backward(3, saved=[0], slots=1, held=2): print(action)
    Reverse(step=2)
    Load(step=0)
    Advance(start=0, stop=1)
    Reverse(step=1)
    Load(step=0)
    Reverse(step=0)
    Drop(step=0)
    """
    stack, at = list(saved), held
    for wanted in range(steps - 1, -1, -1):
        if at != wanted:
            at = stack[-1]
            yield Load(at)
        while at < wanted:
            free = slots - len(stack)
            to = at + split(wanted + 1 - at, free + 1) if free > 0 else wanted
            yield Advance(at, to)
            at = to
            if at < wanted:
                stack.append(at)
                yield Save(at)
        yield Reverse(wanted)
        at = None
        if stack[-1] == wanted:
            yield Drop(stack.pop())


@final
class Online:
    """Which states to keep on the way through a loop whose length is not known.

    Whenever the loop ends, no step has to be advanced over more often than with the best choice that knew the length
    (Wang, Moin and Iaccarino, 2009). Beside ``slots`` states, the latest one is saved too.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._levels: dict[int, float] = {0: math.inf}
        self._standing: list[int] = []
        self._spare: list[int] = []

    @property
    def saved(self) -> list[int]:
        """The saved states, ascending."""
        return list(self._levels)

    def arrive(self, step: int) -> int | None:
        """Save state ``step``, the one after the last that was saved; return the state to forget for it, if any."""
        level, gone = 0.0, None
        if len(self._levels) > self._slots:
            if self._spare:
                gone = self._spare.pop()
            else:
                gone = self._standing.pop() if self._standing else None
                if gone is None:
                    raise AssertionError("unreachable: the latest state stands")
                level = self._levels[gone] + 1
            del self._levels[gone]
        while self._standing and self._levels[self._standing[-1]] < level:
            self._spare.append(self._standing.pop())  # a later state of a higher level makes it dispensable
        self._levels[step] = level
        self._standing.append(step)
        return gone
