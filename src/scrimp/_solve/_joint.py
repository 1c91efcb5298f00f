"""Keep, recompute and store, decided together.

The link to a store moves so many bytes in the seconds before a moment, and so many back in those after it: what may be away at the
moment, its **relief**. A plan of keeps and drops for the budget and the relief together is made as if there were no store; then
what is over the budget is sent away (:mod:`._offload`), and the simulator says what that costs. This is done for several parts of
the relief, and the fastest plan is taken. It is never worse than the plan without a store, which is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .._plan import Decision
from .._simulate import simulate_index
from .._trace import Run, Trace, Value
from ._bound import lower_bound
from ._cut import Cuts
from ._offload import Offload
from ._planner import Planner, Solution

__all__ = ["JointPlanner", "relief"]

_SHARES = (0.95, 0.8, 0.6, 0.35, 1.1, 1.4)  # of the relief that the link gives without a wait
_STEPS = 64  # a relief is rounded down to this many levels
_BISECTIONS = 8


@final
class JointPlanner:
    """Solves one trace for many budgets, with a store of some capacity.

    Args:
        planner: of the trace, without a store.
        capacity: bytes that the store holds.
    """

    def __init__(self, planner: Planner, capacity: int) -> None:
        self.alone: Final = planner
        self._trace = planner.facts.trace
        self._capacity = capacity

    def bound(self, budget: int) -> float:
        """Seconds of the step below which no plan of keeps, drops and stores within the budget can come.

        Count what such a plan has away at a moment as if it were kept: then a plan of keeps and drops within the budget and the
        relief of that moment takes no longer. More added seconds give more relief; the least that are enough are found by halving.
        """
        plain = self.alone.plain
        cuts = Cuts(self.alone.facts)

        def least(added: float) -> float:
            relieved = replace(plain, levels=plain.levels - self._relief(added, self._capacity))
            return lower_bound(cuts, relieved, budget).added_seconds

        enough = min(lower_bound(cuts, plain, budget).added_seconds, plain.seconds * 64)
        too_few = 0.0
        if least(0.0) <= 0.0:
            return plain.seconds
        for _ in range(_BISECTIONS):
            middle = (too_few + enough) / 2
            if least(middle) > middle:
                too_few = middle
            else:
                enough = middle
        return plain.seconds + too_few

    def solve(self, budget: int) -> Solution | None:
        """The fastest plan found within the budget, or ``None``."""
        best = self.alone.solve(budget)
        if self.alone.plain.peak <= budget:
            return best
        for found in self._joint(budget):
            if best is None or found.seconds < best.seconds:
                best = found
        return best

    def _joint(self, budget: int) -> Iterator[Solution]:
        excess = self.alone.plain.peak - budget
        for share in _SHARES:
            allowed = np.minimum((self._relief(0.0, self._capacity) * share).astype(np.int64), min(self._capacity, excess))
            found = self._with_relief(budget, allowed)
            if found is not None:
                yield found

    def _with_relief(self, budget: int, allowed: NDArray[np.int64]) -> Solution | None:
        most = int(allowed.max())
        planner = Planner(_shaped(self._trace, allowed))
        base = planner.solve(budget + most)
        if base is None:
            return None
        facts = self.alone.facts
        decisions: Mapping[int, Decision] | None = Offload(facts, base.decisions, self._capacity).within(budget)
        if decisions is None:
            return None
        timeline = simulate_index(facts, decisions)
        assert timeline.peak <= budget
        return Solution(decisions, timeline.peak, timeline.seconds)

    def _relief(self, added: float, capacity: int) -> NDArray[np.int64]:
        return relief(self.alone, added, capacity)


def relief(planner: Planner, added: float, capacity: int) -> NDArray[np.int64]:
    """Per moment, the bytes that can be away at most in a step that takes ``added`` seconds more than the plain one."""
    facts, plain, trace = planner.facts, planner.plain, planner.facts.trace
    stays = sum(facts.size[value] for value in facts.decided if not facts.unpacks[value])
    out = trace.out_bandwidth * (plain.begins + added)
    back = trace.in_bandwidth * (plain.seconds - plain.begins + added) + stays
    return np.minimum(np.minimum(out, back), capacity).astype(np.int64)


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
