"""Greedy with exact liveness: drop what frees most for its time, give back what the budget has room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from .._plan import Drop, Keep
from ._liveness import Liveness

__all__ = ["reduce", "restore"]

_STILL_LEADS = 0.9  # scores that wait are stale and too good; insisting would try all of many equal blocks each time
_DEEPENED = 64  # values that may be let go once more; long chains, which need more, have schedules of their own
_LEAST_SECONDS = 1e-12  # a gain below this is the noise of adding floats


def reduce(state: Liveness, budget: int, candidates: Sequence[int]) -> bool:
    """Drop values until the peak meets the budget or nothing helps; returns whether it does.

    What is tried next is what frees most bytes-over-budget, summed over moments, for each second added. The
    first estimate is optimistic; a candidate is tried, and taken if its exact score still leads, else it
    waits with it.
    """
    facts = state.facts
    excess = state.excess(budget)
    over = np.concatenate([[0], np.cumsum(state.levels > budget)])
    queue: list[tuple[float, int]] = []
    for value in candidates:
        last = facts.last_release[value] if facts.saved_at[value] >= 0 else state.needed_until(value)
        start, end = facts.natural_end[value] + 1, min(last + 1, facts.moments)
        if state.is_kept(value) and start < end and (moments := int(over[end] - over[start])):
            freed = min(facts.size[value] * moments, excess)
            seconds = facts.trace.ops[facts.owner[value]].seconds
            queue.append((-freed / max(seconds, _LEAST_SECONDS), value))
    heapify(queue)
    while excess and queue:
        _, value = heappop(queue)
        mark = state.mark()
        state.decide(value, Drop())
        left = state.excess(budget)
        score = (excess - left) / max(state.seconds - mark.seconds, _LEAST_SECONDS)
        if left < excess and (not queue or score >= -queue[0][0] * _STILL_LEADS):
            excess = left
            continue
        state.back_to(mark)
        if left < excess:
            heappush(queue, (-score, value))
    return excess == 0 or _deepen(state, budget, candidates)


def _deepen(state: Liveness, budget: int, candidates: Sequence[int]) -> bool:
    """Let dropped values go once more before they are retained, where that helps.

    This reaches what dropping alone cannot: values that a replay computes long before backward asks for them,
    such as the far end of a skip connection. Returns whether the peak fits.
    """
    excess = state.excess(budget)
    over = state.levels > budget
    sizes = state.facts.size
    for value in sorted(candidates, key=lambda value: -sizes[value])[:_DEEPENED]:
        before = state.decision(value)
        if not isinstance(before, Drop) or not any(over[start:end].any() for start, end in state.retained(value)):
            continue
        mark = state.mark()
        state.decide(value, Drop(before.passes + 1))
        left = state.excess(budget)
        if left >= excess:
            state.back_to(mark)
            continue
        excess = left
        over = state.levels > budget
        if not excess:
            return True
    return False


def restore(state: Liveness, budget: int, groups: Iterable[tuple[int, ...]], effort: int) -> bool:
    """Keep again each group of values that saves time within the budget; returns whether any did.

    Ends early when ``effort`` replays were evaluated.
    """
    found = False
    end = state.effort + effort
    for group in groups:
        if state.effort >= end:
            break
        dropped = [value for value in group if not state.is_kept(value)]
        if not dropped:
            continue
        if any(state.level_before_replay(value) + state.facts.size[value] > budget for value in dropped):
            state.effort += 1
            continue
        mark = state.mark()
        state.decide_all(dict.fromkeys(dropped, Keep()))
        if state.seconds < mark.seconds - _LEAST_SECONDS and state.peak <= budget:
            found = True
        else:
            state.back_to(mark)
    return found
