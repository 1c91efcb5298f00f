"""A plan under change: exact peak and seconds, updated decision by decision instead of simulated anew.

Turning one value from kept to dropped changes few replays: those that would have started from it or computed
it, and those that meet what these now leave behind or no longer do. Each replay remembers what it looked at,
so that a change re-evaluates, in the order of time, exactly the replays that could see it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from .._index import Index
from .._plan import Decision, Drop, Keep
from .._replay_cost import ReplayCost, needed_ops, replay_cost
from .._simulate import fixed_values, simulate_index
from .._trace import Unpack

__all__ = ["Liveness"]

_COUNTS_ONCE = 8  # ops of a replay that count as one more replay in the effort


class _Replay(NamedTuple):
    """A replay in the plan: what it looked at, what it computed that has open handles, its cost."""

    looked_at: frozenset[int]
    computed: frozenset[int]
    cost: ReplayCost


class Mark(NamedTuple):
    """A state to go back to: how many changes had been made, and what they led to."""

    changes: int
    levels: NDArray[np.int64]
    seconds: float


_NONE = _Replay(frozenset(), frozenset(), ReplayCost(0.0, 0, 0))


@final
class Liveness:
    """The state of a plan of keeps and drops.

    Attributes:
        levels: most bytes during each moment.
        seconds: of the whole step.
        effort: replays evaluated so far, long ones counting more: a clock for searches that is the same on every
            machine.
    """

    def __init__(self, facts: Index, decisions: Mapping[int, Decision]) -> None:
        self.facts: Final = facts
        plain = simulate_index(facts, {})
        self.levels: NDArray[np.int64] = plain.levels.copy()
        self.seconds = plain.seconds
        self.effort = 0
        self._passes: dict[int, int] = dict.fromkeys(facts.holdable, 0)
        self._fixed = fixed_values(facts, {})
        self._ends = list(facts.last_release)
        self._decided_outputs = [
            [value for value in made if facts.saved_at[value] >= 0 or value in facts.holdable] for made in facts.outputs
        ]
        self._computed_at: dict[int, list[int]] = {}
        self._spans: list[list[tuple[int, int]]] = [[] for _ in facts.trace.values]
        self._replays: dict[int, _Replay] = {}
        self._watchers: dict[int, set[int]] = {}
        self._journal: list[tuple[str, int, Any]] = []  # what changed, where, and what was there before
        self.decide_all(decisions)

    @property
    def decisions(self) -> dict[int, Decision]:
        """The plan as it stands, for every decided value, and what it keeps besides."""
        return {value: self.decision(value) for value in (*self.facts.decided, *self.held)}

    @property
    def held(self) -> list[int]:
        """The values that the plan keeps although nobody saves them."""
        return sorted(self.facts.holdable - self._passes.keys())

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        return int(self.levels.max())

    def excess(self, budget: int) -> int:
        """Bytes over the budget, summed over the moments."""
        return int(np.maximum(self.levels - budget, 0).sum())

    def is_kept(self, value: int) -> bool:
        """Whether the plan keeps a decided value."""
        return value not in self._passes

    def decision(self, value: int) -> Decision:
        """What the plan says about a decided value."""
        return Drop(self._passes[value]) if value in self._passes else Keep()

    def retained(self, value: int) -> list[tuple[int, int]]:
        """The half-open ranges of moments over which a dropped value is there after a replay."""
        return [(after + 1, until + 1) for after, until in self._spans[value]]

    def needed_until(self, value: int) -> int:
        """The last release that needs a value: its own, or that of a dropped value replayed from it."""
        return self._ends[value]

    def level_before_replay(self, value: int) -> int:
        """Most bytes from the moment at which a dropped value goes to the first replay that sees that it is not there.

        Kept, the value stands on top of that: up to there nothing else changes, as a rule.
        """
        first = min(chain(self.facts.unpacks[value], self._watchers.get(value, ())), default=self.facts.moments)
        return int(self.levels[self.facts.natural_end[value] + 1 : first].max(initial=0))

    def decide_all(self, decisions: Mapping[int, Decision]) -> None:
        """Change many decisions, re-evaluating each replay once."""
        moments: set[int] = set()
        for value, decision in decisions.items():
            if decision != self.decision(value):
                moments |= self._change(value, decision)
        self._settle(moments)

    def mark(self) -> Mark:
        """The state as it is, for :meth:`back_to`."""
        return Mark(len(self._journal), self.levels.copy(), self.seconds)

    def back_to(self, mark: Mark) -> None:
        """Undo every change since the mark was made; no replay is evaluated for that."""
        while len(self._journal) > mark.changes:
            match self._journal.pop():
                case "passes", value, None:
                    del self._passes[value]
                    self._fixed[value] = True
                case "passes", value, before:
                    self._passes[value] = before
                    self._fixed[value] = False
                case "end", value, before:
                    self._ends[value] = before
                case "spans", value, before:
                    self._spans[value] = before
                case "replay", moment, before:
                    self._install(moment, before)
        self.levels[:] = mark.levels
        self.seconds = mark.seconds

    def forget_changes(self) -> None:
        """Let go of what :meth:`back_to` needs; marks made before are no longer of use."""
        self._journal.clear()

    def decide(self, value: int, decision: Decision) -> None:
        """Change one decision."""
        if decision != self.decision(value):
            self._settle(self._change(value, decision))

    def _change(self, value: int, decision: Decision) -> set[int]:
        """Change a decision and what follows at once; returns the moments whose replays may change."""
        moments = set(self.facts.unpacks[value]) | self._watchers.get(value, set())
        was_kept = value not in self._passes
        self._journal.append(("passes", value, self._passes.get(value)))
        if isinstance(decision, Drop):
            self._passes[value] = decision.passes
        else:
            self._passes.pop(value, None)
        is_kept = value not in self._passes
        if was_kept != is_kept:
            self._add_held(value, -1 if was_kept else 1)
            self._fixed[value] = is_kept
            moments |= self._spread_demand(value)
        if value in self._computed_at:
            moments |= self._respan(value)
        return moments

    def _add_held(self, value: int, sign: int) -> None:
        """Add or remove what holding a value costs beyond its natural life."""
        start, end = self.facts.natural_end[value] + 1, self._ends[value] + 1
        if start < end:
            self.levels[start:end] += sign * self.facts.size[value]

    def _spread_demand(self, value: int) -> set[int]:
        """Bring up to date until when the values from which ``value`` is replayed are needed.

        Returns:
            The moments whose replays may change because of it.
        """
        moments: set[int] = set()
        stack = [self.facts.owner[value]]
        while stack:
            op = stack.pop()
            if not self.facts.replayable[op]:
                continue
            for read in self.facts.reads[op]:
                end = self._demand(read)
                if end == self._ends[read]:
                    continue
                held = self._fixed[read]
                if held:
                    self._add_held(read, -1)
                self._journal.append(("end", read, self._ends[read]))
                self._ends[read] = end
                if held:
                    self._add_held(read, 1)
                else:
                    stack.append(self.facts.owner[read])
                    if read in self._computed_at:
                        moments |= self._respan(read)
        return moments

    def _demand(self, value: int) -> int:
        facts, ends, fixed = self.facts, self._ends, self._fixed
        latest = facts.last_release[value]
        for reader in facts.readers[value]:
            if facts.replayable[reader]:
                for output in facts.outputs[reader]:
                    if not fixed[output] and ends[output] > latest:
                        latest = ends[output]
        return latest

    def _settle(self, moments: Iterable[int]) -> None:
        """Re-evaluate replays in the order of time until none can change any more."""
        queue = list(moments)
        heapify(queue)
        last = -1
        while queue:
            moment = heappop(queue)
            if moment == last:
                continue
            last = moment
            for later in self._evaluate(moment):
                if later > moment:
                    heappush(queue, later)

    def _evaluate(self, moment: int) -> set[int]:
        """Make the replay at ``moment`` anew; returns the moments whose replays may change because of it."""
        self.effort += 1
        old, new = self._replays.get(moment, _NONE), self._replay(moment)
        if old == new:
            return set()
        self._journal.append(("replay", moment, old))
        self.seconds += new.cost.seconds - old.cost.seconds
        self.levels[moment] += new.cost.peak - old.cost.peak
        touched: set[int] = set()
        for value in self._install(moment, new):
            touched |= self._respan(value)
        return touched

    def _install(self, moment: int, new: _Replay) -> frozenset[int]:
        """Have another replay at ``moment``; returns the values that only one of it and the old computes."""
        old = self._replays.get(moment, _NONE)
        self._replays[moment] = new
        for value in old.looked_at - new.looked_at:
            self._watchers[value].discard(moment)
        for value in new.looked_at - old.looked_at:
            self._watchers.setdefault(value, set()).add(moment)
        for value in old.computed - new.computed:
            self._computed_at[value].remove(moment)
        for value in new.computed - old.computed:
            insort(self._computed_at.setdefault(value, []), moment)
        return old.computed ^ new.computed

    def _replay(self, moment: int) -> _Replay:
        facts = self.facts
        event = facts.trace.events[moment - len(facts.trace.ops)]
        assert isinstance(event, Unpack)
        target = event.value
        if self._is_present(target, moment):
            return _NONE
        is_present, last_release, computed_at = self._is_present, facts.last_release, self._computed_at
        ops, starts = needed_ops(facts, target, lambda value: is_present(value, moment))
        self.effort += len(ops) // _COUNTS_ONCE
        looked_at, computed, remaining = set(starts), set(), set()
        for op in ops:
            for value in self._decided_outputs[op]:
                looked_at.add(value)
                if last_release[value] <= moment or is_present(value, moment):
                    continue
                computed.add(value)
                if value == target or bisect_left(computed_at.get(value, ()), moment) >= self._passes[value]:
                    remaining.add(value)
        cost = replay_cost(facts, ops, starts, remaining)
        return _Replay(frozenset(looked_at), frozenset(computed), cost)

    def _is_present(self, value: int, moment: int) -> bool:
        if self._fixed[value]:
            return True
        spans = self._spans[value]
        return bool(spans) and any(after < moment <= until for after, until in spans)

    def _respan(self, value: int) -> set[int]:
        """Derive when a dropped value is there from when it is computed; returns what may see a change."""
        old, new = self._spans[value], self._retained_spans(value)
        if old == new:
            return set()
        size = self.facts.size[value]
        for after, until in old:
            self.levels[after + 1 : until + 1] -= size
        for after, until in new:
            self.levels[after + 1 : until + 1] += size
        self._journal.append(("spans", value, old))
        self._spans[value] = new
        return self._watchers.get(value, set()) | set(self.facts.unpacks[value])

    def _retained_spans(self, value: int) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        if value not in self._passes:
            return spans
        releases, first = self.facts.releases[value], len(self.facts.trace.ops)
        for passed, moment in enumerate(self._computed_at.get(value, ())):
            if passed >= self._passes[value]:
                spans.append((moment, self._ends[value]))
                break
            if self.facts.trace.events[moment - first] == Unpack(value):
                following = bisect_left(releases, moment + 1)
                spans.append((moment, releases[following] if following < len(releases) else self.facts.moments))
        return spans
