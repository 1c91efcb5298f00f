"""Large-neighbourhood search: disturb the plan in one place, repair it everywhere, keep what is faster."""

from __future__ import annotations

from random import Random

from .._plan import Decision, Drop, Keep
from ._greedy import reduce, restore
from ._liveness import Liveness

__all__ = ["improve", "press"]

_WINDOW = 12  # ops with saved results in one neighbourhood
_SAMPLED = 24  # how many ops elsewhere a repair considers
_SWAPS = 0.3  # the part of the moves that drop first, and see what the freed bytes can keep
_NEAR = (5, 10)  # among how many ops a swap finds what it drops
_ALL = 300  # up to this many ops, a swap considers every one

Unit = tuple[int, ...]
"""The droppable values that one op makes. Its replay brings all of them back, so a repair keeps all of them or none."""


def improve(state: Liveness, budget: int, units: list[Unit], effort: int, enough: float, seed: int = 0) -> None:
    """Make a plan within the budget faster, in place; the result is the same for the same arguments.

    Args:
        state: a plan within the budget.
        budget: bytes.
        units: the droppable values by the ops that make them, in the order of these.
        effort: replays to evaluate, about; the search ends when they are used up.
        enough: seconds at which the search ends, too: nearly proven to be the best.
        seed: of the random choices.
    """
    random = Random(seed)
    end = state.effort + effort
    while units and state.effort < end and state.seconds > enough:
        state.effort += 1  # a move that evaluates nothing must not run for ever
        state.forget_changes()
        mark = state.mark()
        first = random.randrange(len(units))
        move = _swap if random.random() < _SWAPS else _disturb
        fits = move(state, budget, units, first, random, end)
        if not fits or state.seconds > mark.seconds:
            state.back_to(mark)


def press(state: Liveness, units: list[Unit], effort: int, share: int) -> None:
    """Make the peak of a plan smaller, in place, by an at least so-manieth ``share`` of it at a time."""
    random = Random(0)
    end = state.effort + effort
    values = [*_values(units), *state.held]
    kick = False
    while units and state.effort < end:
        state.effort += 1
        state.forget_changes()
        mark, peak = state.mark(), state.peak
        if kick:
            first = random.randrange(len(units))
            state.decide_all(_turned(state, units[first : first + _WINDOW], random))
        kick = not reduce(state, peak - max(peak // share, 1), values)
        if kick:
            state.back_to(mark)


def _swap(state: Liveness, budget: int, units: list[Unit], first: int, random: Random, end: int) -> bool:
    """Drop what up to three neighbouring ops made, and keep instead what saves most time for its bytes."""
    kept = [unit for unit in units[first : first + random.choice(_NEAR)] if state.is_kept(unit[0])]
    dropped = random.sample(kept, random.randint(min(1, len(kept)), min(3, len(kept))))
    state.decide_all({value: Drop() for unit in dropped for value in unit})
    considered = units if len(units) <= _ALL else _around(units, first, random)
    if state.peak > budget and not reduce(state, budget, _values(considered)):
        return False
    others = [unit for unit in considered if not all(map(state.is_kept, unit)) and unit not in dropped]
    others.sort(key=lambda unit: -_seconds_for_bytes(state, unit))
    restore(state, budget, [*others, *dropped], effort=end - state.effort)
    return True


def _disturb(state: Liveness, budget: int, units: list[Unit], first: int, random: Random, end: int) -> bool:
    """Turn over what a few neighbouring ops made, and repair it there and in some other places."""
    state.decide_all(_turned(state, units[first : first + _WINDOW], random))
    nearby = _around(units, first, random)
    if not reduce(state, budget, _values(nearby)):
        return False
    restore(state, budget, random.sample(nearby, len(nearby)), effort=end - state.effort)
    return True


def _seconds_for_bytes(state: Liveness, unit: Unit) -> float:
    facts = state.facts
    return facts.trace.ops[facts.owner[unit[0]]].seconds / sum(facts.size[value] for value in unit)


def _values(units: list[Unit]) -> list[int]:
    return [value for unit in units for value in unit]


def _around(units: list[Unit], first: int, random: Random) -> list[Unit]:
    """A neighbourhood, and some ops elsewhere."""
    return sorted({*units[first : first + _WINDOW], *random.sample(units, min(_SAMPLED, len(units)))})


def _turned(state: Liveness, window: list[Unit], random: Random) -> dict[int, Decision]:
    """What a few ops made the other way, mostly from dropped to kept: dropping is what the repair does."""
    changed = random.sample(window, random.randint(1, min(4, len(window))))
    keep_only = random.random() < 0.5
    return {value: Keep() if keep_only or not state.is_kept(unit[0]) else Drop() for unit in changed for value in unit}
