"""Large-neighbourhood search: disturb the plan in one place, repair it everywhere, keep what is faster."""

from __future__ import annotations

from random import Random

from .._plan import Decision, Drop, Keep
from ._greedy import changes_between, reduce, restore
from ._liveness import Liveness

__all__ = ["improve"]

_WINDOW = 12  # saved values in one neighbourhood
_SAMPLED = 24  # how many values elsewhere a repair considers
_SWAPS = 0.3  # the part of the moves that drop first, and see what the freed bytes can keep
_NEAR = (5, 10)  # among how many values a swap finds what it drops
_ALL = 300  # up to this many values, a swap considers every one


def improve(state: Liveness, budget: int, values: list[int], effort: int, enough: float, seed: int = 0) -> None:
    """Make a plan within the budget faster, in place; the result is the same for the same arguments.

    Args:
        state: a plan within the budget.
        budget: bytes.
        values: the droppable values, in the order of the ops that make them.
        effort: replays to evaluate, about; the search ends when they are used up.
        enough: seconds at which the search ends, too: nearly proven to be the best.
        seed: of the random choices.
    """
    random = Random(seed)
    end = state.effort + effort
    while values and state.effort < end and state.seconds > enough:
        state.effort += 1  # a move that evaluates nothing must not run for ever
        old, seconds = state.decisions, state.seconds
        first = random.randrange(len(values))
        move = _swap if random.random() < _SWAPS else _disturb
        fits = move(state, budget, values, first, random, end)
        if not fits or state.seconds > seconds:
            state.decide_all(changes_between(old, state))


def _swap(state: Liveness, budget: int, values: list[int], first: int, random: Random, end: int) -> bool:
    """Drop up to three neighbouring kept values, and keep instead what saves most time for its bytes."""
    kept = [value for value in values[first : first + random.choice(_NEAR)] if state.is_kept(value)]
    dropped = random.sample(kept, random.randint(min(1, len(kept)), min(3, len(kept))))
    state.decide_all(dict.fromkeys(dropped, Drop()))
    considered = values if len(values) <= _ALL else _around(values, first, random)
    if state.peak > budget and not reduce(state, budget, considered):
        return False
    facts = state.facts
    others = [value for value in considered if not state.is_kept(value) and value not in dropped]
    others.sort(key=lambda value: -facts.trace.ops[facts.owner[value]].seconds / facts.size[value])
    restore(state, budget, [(value,) for value in (*others, *dropped)], effort=end - state.effort)
    return True


def _disturb(state: Liveness, budget: int, values: list[int], first: int, random: Random, end: int) -> bool:
    """Turn over a few neighbouring values, and repair it there and in some other places."""
    state.decide_all(_turned(state, values[first : first + _WINDOW], random))
    nearby = _around(values, first, random)
    if not reduce(state, budget, nearby):
        return False
    groups = [(value,) for value in random.sample(nearby, len(nearby))]
    restore(state, budget, groups, effort=end - state.effort)
    return True


def _around(values: list[int], first: int, random: Random) -> list[int]:
    """A neighbourhood, and some values elsewhere."""
    return sorted({*values[first : first + _WINDOW], *random.sample(values, min(_SAMPLED, len(values)))})


def _turned(state: Liveness, window: list[int], random: Random) -> dict[int, Decision]:
    """A few values the other way, mostly from dropped to kept: dropping is what the repair does."""
    changed = random.sample(window, random.randint(1, min(4, len(window))))
    keep_only = random.random() < 0.5
    return {value: Keep() if keep_only or not state.is_kept(value) else Drop() for value in changed}
