"""Keep, recompute and store, decided together.

The link to a store moves so many bytes in the seconds before a moment, and so many back in those after it: what may be
away at the moment, its **relief**. A plan of keeps and drops for the budget and the relief together is made as if there
were no store; then what is over the budget is sent away (:mod:`._offload`), and the simulator says what that costs.
This is done for several parts of the relief, and the fastest plan is taken: never one that is slower than the plan
without a store, which is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .._simulate import simulate_index
from .._trace import Run, Trace, Value
from ._bound import lower_bound
from ._cut import Cuts
from ._offload import Offload
from ._planner import CLOSE, Planner, Solution

__all__ = ["JointPlanner"]

_HIDDEN = (0.98, 0.95, 0.9, 0.8, 0.6, 0.35)  # of the relief that the link gives without a wait
_WAITING = (1.1, 1.4, 2.0, 4.0, 16.0)  # of it, at the price of waits
_PATIENCE = 2
_LEAST_RELIEF = 512  # parts of the bytes over budget: a relief smaller than one is none
_STEPS = 64  # a relief is rounded to this many levels
_LEAST, _MOST, _HALVINGS = 1 / 256, 64.0, 5  # of the plain step: between these, a bound is doubled, and halved after
_SMALLEST_WITHIN = 20  # the smallest peak is searched to five percent


@final
class JointPlanner:
    """Solves one trace for many budgets, with a store of some capacity.

    Args:
        planner: of the trace, without a store.
        capacity: bytes that the store holds.
    """

    def __init__(self, planner: Planner, capacity: int) -> None:
        self.alone: Final = planner
        self.facts: Final = planner.facts
        self.plain: Final = planner.plain
        self._trace = planner.facts.trace
        self._capacity = capacity
        self._cuts = Cuts(planner.facts)

    def bound(self, budget: int) -> float:
        """Seconds of the step below which no plan of keeps, drops and stores within the budget can come.

        Count what such a plan has away at a moment as if it were kept: then a plan of keeps and drops within the budget
        and the relief of that moment takes no longer. More added seconds give more relief, so the least that are enough
        for their own relief are found by doubling and halving.
        """
        plain = self.plain

        def is_too_few(added: float) -> bool:
            relieved = replace(plain, levels=plain.levels - self._relief(added))
            return lower_bound(self._cuts, relieved, budget).added_seconds > added

        too_few, enough = 0.0, 0.0
        while enough < _MOST * plain.seconds and is_too_few(enough):
            too_few, enough = enough, max(2 * enough, _LEAST * plain.seconds)
        for _ in range(_HALVINGS if too_few else 0):
            middle = (too_few + enough) / 2
            if is_too_few(middle):
                too_few = middle
            else:
                enough = middle
        return plain.seconds + too_few

    def solve(self, budget: int) -> Solution | None:
        """The fastest plan found within the budget, or ``None``."""
        best = self.alone.solve(budget)
        if self.plain.peak <= budget:
            return best
        tried: set[bytes] = set()
        for shares in (_HIDDEN, _WAITING):
            for found in self._joint(budget, shares, tried):
                if best is None or found.seconds < best.seconds:
                    best = found
            if best is not None and best.seconds <= self.plain.seconds * (1 + CLOSE):
                break
        return best

    def polished(self, solution: Solution, budget: int) -> Solution:
        """A plan within the budget, as it is: what it stores leaves no room to move values one by one."""
        return solution

    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        best = self.alone.smallest()
        too_small = 0
        while too_small + max(best.peak // _SMALLEST_WITHIN, 1) < best.peak:
            budget = (too_small + best.peak) // 2
            found = next(self._joint(budget, (_HIDDEN[0], *_WAITING[2:]), set()), None)
            if found is None:
                too_small = budget
            else:
                best = found
        return best

    def _joint(self, budget: int, shares: Iterable[float], tried: set[bytes]) -> Iterator[Solution]:
        """Plans with stores, until several shares one after the other give none that is faster."""
        excess = self.plain.peak - budget
        enough = self.plain.seconds * (1 + CLOSE)
        fastest, in_vain = np.inf, 0
        for share in shares:
            allowed = np.minimum((self._relief(0.0) * share).astype(np.int64), min(self._capacity, excess))
            if int(allowed.max()) * _LEAST_RELIEF < excess:
                continue  # too slow a link, or too small a store, to change anything
            if allowed.tobytes() in tried:
                continue  # the store is full before the link is
            tried.add(allowed.tobytes())
            found = self._with_relief(budget, allowed)
            if found is not None:
                yield found
                in_vain = 0 if found.seconds < fastest else in_vain + 1
                fastest = min(fastest, found.seconds)
                if in_vain == _PATIENCE or fastest <= enough:
                    return

    def _with_relief(self, budget: int, allowed: NDArray[np.int64]) -> Solution | None:
        """A plan for the budget and the relief, with as much stored as that takes."""
        base = Planner(_shaped(self._trace, allowed)).solve(budget + int(allowed.max()))
        if base is None:
            return None
        facts = self.facts
        decisions = Offload(facts, base.decisions, self._capacity).within(budget)
        if decisions is None:
            return None
        timeline = simulate_index(facts, decisions)
        return Solution(decisions, timeline.peak, timeline.seconds) if timeline.peak <= budget else None

    def _relief(self, added: float) -> NDArray[np.int64]:
        """Per moment, the bytes that can be away at most in a step with ``added`` seconds more than the plain one."""
        facts, plain = self.facts, self.plain
        stays = sum(facts.size[value] for value in facts.decided if not facts.unpacks[value])
        out = self._trace.out_bandwidth * (plain.begins + added)
        back = self._trace.in_bandwidth * (plain.seconds - plain.begins + added) + stays
        return np.minimum(np.minimum(out, back), self._capacity).astype(np.int64)


def _shaped(trace: Trace, allowed: NDArray[np.int64]) -> Trace:
    """The trace with bytes of nobody, such that the level of a moment lacks ``allowed`` from the largest that is."""
    most, ops = int(allowed.max()), len(trace.ops)
    unit = max(most // _STEPS, 1)
    lacking = -(-(most - allowed) // unit)
    rising = np.minimum.accumulate(lacking[:ops])
    values = list(trace.values)
    for level in range(int(rising[0]) if ops else 0):
        still = int(np.flatnonzero(rising > level)[-1])
        values.append(Value(unit, op=0, output=-1 - level, dies_after=still))
    events = []
    standing = 0
    for moment, event in enumerate(trace.events, start=ops):
        if isinstance(event, Run):
            coming = max(int(np.maximum.accumulate(lacking[ops:])[moment - ops]) * unit - standing, 0)
            standing += coming
            event = replace(event, net=event.net + coming, peak=event.peak + coming)
        events.append(event)
    return replace(trace, values=tuple(values), events=tuple(events))
