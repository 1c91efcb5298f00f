"""The solvers together: cuts give starts, exact liveness repairs and polishes, the simulator judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from .._index import Index, index
from .._plan import Decision, Drop, Keep
from .._simulate import Timeline, simulate_index
from .._trace import Trace
from ._blend import blend
from ._bound import Bound, lower_bound, lower_bound_of_peak
from ._cut import Cuts
from ._greedy import reduce, restore
from ._liveness import Liveness
from ._search import improve

__all__ = ["Planner", "Solution"]

_CLOSE = 5e-4  # of the step's time: a plan this close to the proven bound is not searched further
_EFFORT = 8000  # replays that a repair, and the search after it, may evaluate
_SMALLEST_WITHIN = 200  # the smallest peak is searched to half a percent
_SMALL = 300  # values up to which starting from everything kept is worth its time


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions and what the simulator says of them."""

    decisions: Mapping[int, Decision]
    peak: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Start:
    decisions: Mapping[int, Decision]
    timeline: Timeline


@final
class Planner:
    """Solves one trace for many budgets; what does not depend on the budget is computed once."""

    def __init__(self, trace: Trace) -> None:
        self.facts: Final[Index] = index(trace)
        self.plain: Final = simulate_index(self.facts, {})
        self._cuts = Cuts(self.facts)
        owner = self.facts.owner
        self._values = sorted(self._cuts.values.tolist(), key=lambda value: owner[value])
        self._groups = sorted(self._cuts.groups(), key=lambda group: owner[group[0]])
        self._singles = sorted(
            ((value,) for value in self._values),
            key=lambda group: -trace.ops[owner[group[0]]].seconds / self.facts.size[group[0]],
        )

    def bound(self, budget: int) -> float:
        """Seconds of the step below which no plan of keeps and drops within the budget can come."""
        return self.plain.seconds + lower_bound(self._cuts, self.plain, budget).added_seconds

    def solve(self, budget: int) -> Solution | None:
        """The fastest plan found within the budget, or ``None``."""
        if self.plain.peak <= budget:
            return self._keep_all()
        bound = lower_bound(self._cuts, self.plain, budget)
        best = self._fit(budget, bound)
        if best is None:
            return None
        improve(best, budget, self._values, effort=_EFFORT, enough=self._enough(bound))
        return self._judged(best)

    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        best = self._keep_all()
        too_small = lower_bound_of_peak(self._cuts, self.plain) - 1
        while too_small + max(best.peak // _SMALLEST_WITHIN, 1) < best.peak:
            budget = (too_small + best.peak) // 2
            state = self._fit(budget, lower_bound(self._cuts, self.plain, budget))
            if state is None:
                too_small = budget
            else:
                best = self._judged(state)
        return best

    def _keep_all(self) -> Solution:
        return Solution({value: Keep() for value in self.facts.decided}, self.plain.peak, self.plain.seconds)

    def _judged(self, state: Liveness) -> Solution:
        decisions = state.decisions
        timeline = simulate_index(self.facts, decisions)
        return Solution(decisions, timeline.peak, timeline.seconds)

    def _enough(self, bound: Bound) -> float:
        return self.plain.seconds * (1 + _CLOSE) + bound.added_seconds

    def _fit(self, budget: int, bound: Bound) -> Liveness | None:
        best: Liveness | None = None
        for decisions in self._starts(budget, bound):
            state = self._repair(decisions, budget, self._enough(bound))
            if state is not None and (best is None or state.seconds < best.seconds):
                best = state
            if best is not None and best.seconds <= self._enough(bound):
                break
        return best

    def _starts(self, budget: int, bound: Bound) -> list[Mapping[int, Decision]]:
        """Plans to repair: the best that fits, the closest that do not, and blends of the two."""
        found = [self._start(drop_set) for drop_set in self._drop_sets(bound)]
        fitting = [start for start in found if start.timeline.peak <= budget]
        failing = [start for start in found if start.timeline.peak > budget]
        failing.sort(key=lambda start: int(np.maximum(start.timeline.levels - budget, 0).sum()))
        starts = [start.decisions for start in failing[:2]]
        if fitting:
            best = min(fitting, key=lambda start: start.timeline.seconds)
            faster = [start for start in failing if start.timeline.seconds < best.timeline.seconds]
            blends = [
                blend(self.facts, best.decisions, start.decisions, self._groups, budget)
                for start in faster[:2]
            ]
            starts = [*blends, best.decisions]
        if len(self._values) <= _SMALL:
            starts.append({})
        return starts

    def _drop_sets(self, bound: Bound) -> list[Mapping[int, Decision]]:
        seen: dict[bytes, Mapping[int, Decision]] = {}
        for mask in bound.drop_sets:
            seen[mask.tobytes()] = {int(value): Drop() for value in self._cuts.values[mask]}
        return list(seen.values())

    def _start(self, decisions: Mapping[int, Decision]) -> _Start:
        return _Start(decisions, simulate_index(self.facts, decisions))

    def _repair(self, decisions: Mapping[int, Decision], budget: int, enough: float) -> Liveness | None:
        state = Liveness(self.facts, decisions)
        if not reduce(state, budget, self._values):
            return None
        end = state.effort + _EFFORT
        while state.seconds > enough and state.effort < end:
            if not restore(state, budget, [*self._groups, *self._singles], effort=end - state.effort):
                break
        return state
