"""The solvers together: cuts give starts, exact liveness repairs and polishes, the simulator judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final, final

import numpy as np

from .._index import Index, index
from .._plan import Decision, Drop, Keep
from .._simulate import Timeline, simulate_index
from .._trace import Trace
from ._blend import blend
from ._blocks import Block, Menu, find_blocks, menu_of
from ._bound import Bound, Relaxed, lower_bound, lower_bound_of_peak
from ._cut import Cuts
from ._greedy import reduce, restore
from ._liveness import Liveness
from ._rotor import Rotor
from ._search import Unit, improve, press

__all__ = ["CLOSE", "Planner", "Solution"]

CLOSE = 5e-4  # of the step's time: a plan this close to the proven bound is not searched further
_CHAIN_PAYS = 0.01  # of the step's time: a chain's schedule is looked for when this much may be gained
_BAND = 10  # longest split in a chain's schedule, at least
_CELLS = 2000  # about how many subchains to solve: short chains get a wider band
_MOST_CELLS = 10_000  # and where nothing is found
_SHARES = (1.0, 0.97, 0.93)  # of the budget, for schedules whose rounded bytes exceed it
_MENU_BUDGETS = (0.8, 0.6, 0.4, 0.2)  # of the plain peak: whose cuts make the options of the blocks
_EFFORT = 9000  # what a repair, and a search after it, may evaluate
_EFFORT_EACH = 200  # but no more than this for each value: few values are soon exhausted
_SEARCHED = 4  # repaired starts that are searched from
_ABOUT = 50  # the smallest peak is looked for to two percent,
_SMALLEST_WITHIN = 200  # and from there in steps of half a percent
_SMALL = 300  # values up to which starting from everything kept, and long searches, are worth their time


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
        saved = self._cuts.values[~self._cuts.is_held].tolist()
        self._values = sorted(saved, key=lambda value: owner[value])
        self._units: list[Unit] = [tuple(unit) for _, unit in groupby(self._values, key=lambda value: owner[value])]
        few = len(self._values) <= _SMALL  # with many, a replay takes longer, and blends find most of what there is
        self._effort = min(_EFFORT if few else _EFFORT // 2, _EFFORT_EACH * len(self._values))
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
        enough = self._enough(bound)
        found = sorted(self._repaired(budget, bound, enough), key=lambda state: state.seconds)
        if not found:
            return None
        units = self._units_of(found)
        # Plans that differ in kind lead to different optima, and the fastest to begin with is often not the best in
        # the end: each is searched a little, the best of them longer.
        for seed, state in enumerate(found[:_SEARCHED]):  # fixed seeds: a plan is a function of its arguments
            improve(state, budget, units, self._effort, enough, seed)
            if state.seconds <= enough:
                return self._judged(state)
        best = min(found, key=lambda state: state.seconds)
        improve(best, budget, units, _SEARCHED * self._effort, enough, seed=_SEARCHED)
        return self._judged(best)

    def smallest(self) -> Solution:
        """The plan with the smallest peak found."""
        best = self._keep_all()
        too_small = lower_bound_of_peak(self._cuts, self.plain) - 1
        while too_small + max(best.peak // _ABOUT, 1) < best.peak:
            budget = (too_small + best.peak) // 2
            bound = lower_bound(self._cuts, self.plain, budget)
            state = next(self._repaired(budget, bound, enough=np.inf), None)
            if state is None:
                too_small = budget
            else:
                best = self._judged(state)
        state = Liveness(self.facts, best.decisions)
        press(state, self._units, self._effort, _SMALLEST_WITHIN)
        return self.polished(self._judged(state), state.peak)

    def polished(self, solution: Solution, budget: int) -> Solution:
        """A plan within the budget, made faster where the budget has room for it."""
        state = Liveness(self.facts, solution.decisions)
        restore(state, budget, [*self._groups, *self._singles], self._effort)
        improve(state, budget, self._units_of([state]), self._effort, enough=0.0)
        return self._judged(state)

    def _units_of(self, states: list[Liveness]) -> list[Unit]:
        """What a search moves: the droppable values of each op, and what a plan holds besides."""
        return sorted([*self._units, *((value,) for value in {held for state in states for held in state.held})])

    def _keep_all(self) -> Solution:
        return Solution({value: Keep() for value in self.facts.decided}, self.plain.peak, self.plain.seconds)

    def _judged(self, state: Liveness) -> Solution:
        decisions = state.decisions
        timeline = simulate_index(self.facts, decisions)
        return Solution(decisions, timeline.peak, timeline.seconds)

    def _enough(self, bound: Bound) -> float:
        return self.plain.seconds * (1 + CLOSE) + bound.added_seconds

    def _repaired(self, budget: int, bound: Bound, enough: float) -> Iterator[Liveness]:
        """The starts, repaired; one that takes no more than ``enough`` seconds is the last."""
        if np.isinf(bound.added_seconds):
            return
        best = np.inf
        for decisions in self._starts(budget, bound):
            state = self._repair(decisions, budget, enough)
            if state is not None:
                best = min(best, state.seconds)
                yield state
                if best <= enough:
                    return
        if best == np.inf or best > enough + _CHAIN_PAYS * self.plain.seconds:
            for decisions in self._schedules(budget):
                state = self._repair(decisions, budget, enough)
                if state is not None:
                    yield state

    def _schedules(self, budget: int) -> list[Mapping[int, Decision]]:
        """Chain schedules for the budget, and for less where those exceed it in exact bytes."""
        if len(self._blocks) < 3:
            return []
        found: list[Mapping[int, Decision]] = []
        for share in _SHARES:
            decisions = self._schedule(int(budget * share))
            if decisions is None:
                break
            found.append(decisions)
            if simulate_index(self.facts, decisions).peak <= budget:
                break
        return found

    def _schedule(self, nbytes: int) -> Mapping[int, Decision] | None:
        """The chain's schedule, with wider and wider bands where narrow ones find nothing."""
        count = len(self._blocks)
        width = max(_BAND, _CELLS // count)
        widest = max(2 * width, _MOST_CELLS // count)
        while True:
            decisions = Rotor(self.facts, self._blocks, self._menus, nbytes, width).decisions()
            if decisions is not None or width >= min(count, widest):
                return decisions
            width = min(2 * width, widest)

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return find_blocks(self.facts)

    @cached_property
    def _menus(self) -> tuple[Menu, ...]:
        relaxed = Relaxed(self._cuts, self.plain)
        masks = [
            mask
            for share in _MENU_BUDGETS
            for mask in lower_bound(self._cuts, self.plain, int(share * self.plain.peak)).drop_sets
        ]
        handed = [block.entry for block in self._blocks[1:]] + [None]
        return tuple(
            menu_of(self._cuts, relaxed, block, hands_on, masks)
            for block, hands_on in zip(self._blocks, handed, strict=True)
        )

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
            blends = [blend(self.facts, best.decisions, start.decisions, self._groups, budget) for start in faster[:2]]
            starts = [*blends, best.decisions]
        if len(self._values) <= _SMALL:
            starts.append({})
        return starts

    def _drop_sets(self, bound: Bound) -> list[Mapping[int, Decision]]:
        seen: dict[bytes, Mapping[int, Decision]] = {}
        for mask in bound.drop_sets:
            decisions: dict[int, Decision] = {int(value): Drop() for value in self._cuts.values[mask]}
            decisions |= {int(value): Keep() for value in self._cuts.values[self._cuts.is_held & ~mask]}
            seen[mask.tobytes()] = decisions
        return list(seen.values())

    def _start(self, decisions: Mapping[int, Decision]) -> _Start:
        return _Start(decisions, simulate_index(self.facts, decisions))

    def _repair(self, decisions: Mapping[int, Decision], budget: int, enough: float) -> Liveness | None:
        state = Liveness(self.facts, decisions)
        if not reduce(state, budget, [*self._values, *state.held]):
            return None
        end = state.effort + self._effort
        while state.seconds > enough and state.effort < end:
            if not restore(state, budget, [*self._groups, *self._singles], effort=end - state.effort):
                break
        return state
