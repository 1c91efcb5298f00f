"""Large-neighbourhood search: disturb the plan in one place, repair it everywhere, keep what is faster."""

from __future__ import annotations

from random import Random

from .._plan import Decision, Drop, Keep
from ._greedy import changes_between, reduce, restore
from ._liveness import Liveness

__all__ = ["improve"]

_WINDOW = 12  # saved values in one neighbourhood
_SAMPLED = 24  # how many values elsewhere a repair considers


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
        state.effort += 1  # a disturbance that evaluates nothing must not run for ever
        old, seconds = state.decisions, state.seconds
        first = random.randrange(len(values))
        window = values[first : first + _WINDOW]
        state.decide_all(_disturbance(state, window, random))
        nearby = {*window, *random.sample(values, min(_SAMPLED, len(values)))}
        repaired = reduce(state, budget, sorted(nearby))
        if repaired:
            groups = [(value,) for value in random.sample(sorted(nearby), len(nearby))]
            restore(state, budget, groups, effort=end - state.effort)
        if not repaired or state.seconds > seconds:
            state.decide_all(changes_between(old, state))


def _disturbance(state: Liveness, window: list[int], random: Random) -> dict[int, Decision]:
    """Turn over a few neighbouring values, mostly from dropped to kept: dropping is what the repair does."""
    changed = random.sample(window, random.randint(1, min(4, len(window))))
    keep_only = random.random() < 0.5
    return {value: Keep() if keep_only or not state.is_kept(value) else Drop() for value in changed}
