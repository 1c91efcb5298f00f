"""Which kept values wait in a store, and when they go and come back: as many as it takes, hidden under the step.

Where a value waits changes the bytes of moments and the seconds of waits, but no replay. So, for fixed drops, levels
are known without simulating, and a schedule is made in three passes. Values are **chosen** at an even pace over the
forward pass, so that the link is never idle and never late. They are **timed**: each goes when its copy is done, and
comes back as late as still hides. Where bytes are over the budget nevertheless, they are **pressed**: freed sooner or
fetched later, at the price of a wait. Where there is room, they are **loosened**: freed later and fetched sooner than
they need be, since a link, and a step, are never just as fast as a trace says.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .._index import Index
from .._pieces import pieces_for
from .._plan import Decision, Drop, Keep, Store
from .._simulate import Timeline, fixed_values, hold_ends, simulate_index
from .._trace import Unpack

__all__ = ["Offload"]

_FINEST = 512  # a value smaller than this part of the bytes over budget is not worth a copy
_PACES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 16.0)  # of the link's: what is faster waits
_HALVINGS = 4
_SLACK = 0.05  # of the step: so much sooner a copy may come back than it is needed, and so much later it may go


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A value that might be stored.

    Attributes:
        saved_at: the op after which its copy may begin.
        held_until: the last moment at whose start somebody else holds it: before, nothing is gained.
        need: the moment at which it must be back, or after which nobody holds it.
        returns: whether it must be back at all.
    """

    value: int
    size: int
    saved_at: int
    held_until: int
    need: int
    returns: bool


@dataclass(slots=True)
class _Trip:
    """A stored value's way: gone after op ``free_at``, under way back from moment ``fetch_at``."""

    what: _Candidate
    free_at: int
    fetch_at: int

    @property
    def away(self) -> slice:
        """The moments during which it takes nothing."""
        first = max(self.what.held_until, self.free_at) + 1
        return slice(first, max(self.fetch_at, first))


@final
class Offload:
    """Adds stores to a plan of keeps and drops, for any budget.

    Args:
        facts: of the trace.
        decisions: the plan.
        capacity: bytes that the store holds.
    """

    def __init__(self, facts: Index, decisions: Mapping[int, Decision], capacity: int) -> None:
        self.facts: Final = facts
        self.timeline: Final[Timeline] = simulate_index(facts, decisions)
        self._decisions = decisions
        self._capacity = capacity
        self._ops = len(facts.trace.ops)
        self._op_ends = [
            begin + op.seconds for begin, op in zip(self.timeline.begins[: self._ops], facts.trace.ops, strict=True)
        ]
        self._begins: list[float] = self.timeline.begins.tolist()
        self._noticed = _noticed_moments(facts)
        self._noticed_begins = [self._time_of(moment) for moment in self._noticed]
        self._candidates = self._find_candidates()

    def within(self, budget: int) -> dict[int, Decision] | None:
        """The decisions with as few stores as it takes to meet the budget; ``None`` where none do."""
        over = self.timeline.levels > budget
        if not over.any():
            return dict(self._decisions)
        excess = int(self.timeline.levels.max()) - budget
        useful = self._useful(over, excess)
        before = 0.0
        for pace in _PACES:
            trips = self._trips(useful, pace, budget)
            if trips is not None:
                for _ in range(_HALVINGS):
                    middle = (before + pace) / 2
                    slower = self._trips(useful, middle, budget)
                    if slower is None:
                        before = middle
                    else:
                        pace, trips = middle, slower
                return self._loosest(self._pruned(trips, budget), budget)
            before = pace
        return None

    # -- candidates -------------------------------------------------------------------------------------------------

    def _find_candidates(self) -> list[_Candidate]:
        """The kept values, in the order in which they are saved, with the moment at which backward needs each."""
        facts, last = self.facts, len(self.facts.trace.events) - 1
        kept = [
            value
            for value in facts.decided
            if facts.size[value]
            and not isinstance(self._decisions.get(value), Drop)
            and facts.natural_end[value] < self._ops
        ]
        probe: dict[int, Decision] = {value: Store(facts.saved_at[value], last) for value in kept}
        needs = {
            span.value: span.after + 1
            for span in simulate_index(facts, {**self._decisions, **probe}).spans
            if span.value in probe and span.after >= self._ops - 1
        }
        ends = hold_ends(facts, fixed_values(facts, self._decisions))
        found = [
            _Candidate(
                value,
                size=facts.size[value],
                saved_at=facts.saved_at[value],
                held_until=facts.natural_end[value],
                need=needs.get(value, ends[value] + 1),
                returns=value in needs,
            )
            for value in kept
        ]
        return sorted(found, key=lambda one: one.saved_at)

    def _useful(self, over: NDArray[np.bool_], excess: int) -> list[_Candidate]:
        """Those that could be away, were the link theirs alone, at a moment that is over the budget."""
        before = np.concatenate([[0], np.cumsum(over)])
        found = []
        for one in self._candidates:
            if one.size * _FINEST < excess:
                continue
            out, back = self._copy_seconds(one)
            gone = bisect_left(self._op_ends, self._op_ends[one.saved_at] + out)
            trip = _Trip(one, gone, self._last_begin(self._time_of(one.need) - back))
            first, end = trip.away.start, trip.away.stop
            if first < end and before[end] > before[first]:
                found.append(one)
        return found

    def _copy_seconds(self, one: _Candidate) -> tuple[float, float]:
        trace = self.facts.trace
        return one.size / trace.out_bandwidth, one.size / trace.in_bandwidth

    def _time_of(self, moment: int) -> float:
        return self._begins[moment] if moment < self.facts.moments else self.timeline.seconds

    def _last_begin(self, second: float) -> int:
        """The last moment of backward that begins by then and that a session notices."""
        return self._noticed[max(bisect_right(self._noticed_begins, second) - 1, 0)]

    # -- schedules --------------------------------------------------------------------------------------------------

    def _trips(self, useful: Sequence[_Candidate], pace: float, budget: int) -> list[_Trip] | None:
        trips = self._timed(self._chosen(useful, pace))
        return trips if self._press(trips, budget) else None

    def _chosen(self, useful: Sequence[_Candidate], pace: float) -> list[_Candidate]:
        chosen: list[_Candidate] = []
        owed, since, room = 0.0, 0.0, self._capacity
        for one in useful:
            now = self._op_ends[one.saved_at]
            owed += pace * self.facts.trace.out_bandwidth * (now - since)
            since = now
            takes = sum(pieces_for(one.size))
            if owed >= one.size / 2 and takes <= room:
                chosen.append(one)
                owed -= one.size
                room -= takes
        return chosen

    def _timed(self, chosen: Sequence[_Candidate]) -> list[_Trip]:
        """Free each when its copy is done, and fetch it as late as hides, in the reverse order of need."""
        trips: list[_Trip] = []
        engine = 0.0
        for one in chosen:
            engine = max(engine, self._op_ends[one.saved_at]) + self._copy_seconds(one)[0]
            done = min(bisect_left(self._op_ends, engine), self._ops - 1)
            trips.append(_Trip(one, max(done, one.saved_at), one.need))
        busy_from = self.timeline.seconds
        for trip in sorted(trips, key=lambda trip: -trip.what.need):
            if trip.what.returns:
                busy_from = min(busy_from, self._time_of(trip.what.need)) - self._copy_seconds(trip.what)[1]
                trip.fetch_at = min(self._last_begin(busy_from), trip.what.need)
        return trips

    def _press(self, trips: list[_Trip], budget: int) -> bool:
        """Free sooner and fetch later until every moment is within the budget; tells whether that is possible."""
        levels = self.timeline.levels.copy()
        for trip in trips:
            levels[trip.away] -= trip.what.size
        for moment in np.flatnonzero(levels > budget).tolist():
            excess = int(levels[moment]) - budget
            if excess <= 0:
                continue
            for trip in self._movable(trips, moment):
                levels[trip.away] += trip.what.size
                if moment < self._ops:
                    trip.free_at = moment - 1
                else:
                    trip.fetch_at = self._noticed_after(moment, trip.what.need)
                levels[trip.away] -= trip.what.size
                excess = int(levels[moment]) - budget
                if excess <= 0:
                    break
            if excess > 0:
                return False
        return True

    def _noticed_after(self, moment: int, need: int) -> int:
        """The first moment after this one that a session notices, or the one at which it needs the value."""
        later = bisect_right(self._noticed, moment)
        return min(self._noticed[later], need) if later < len(self._noticed) else need

    def _movable(self, trips: list[_Trip], moment: int) -> list[_Trip]:
        """The trips that could be away at a moment and are not, those first that wait least."""
        if moment < self._ops:
            return [trip for trip in trips if max(trip.what.saved_at, trip.what.held_until) < moment <= trip.free_at]
        waiting = [trip for trip in trips if trip.fetch_at <= moment < trip.what.need]
        return sorted(waiting, key=lambda trip: -trip.what.need)

    def _pruned(self, trips: list[_Trip], budget: int) -> list[_Trip]:
        """Keep again what the budget has room for, what was saved last first."""
        levels = self.timeline.levels.copy()
        for trip in trips:
            levels[trip.away] -= trip.what.size
        needed = []
        for trip in reversed(trips):
            if int(levels[trip.away].max(initial=0)) + trip.what.size <= budget:
                levels[trip.away] += trip.what.size
            else:
                needed.append(trip)
        return needed

    def _loosest(self, trips: Sequence[_Trip], budget: int) -> dict[int, Decision]:
        """The decisions with as much slack as the budget has room for, if that costs no time."""
        tight = self._decided(trips)
        self._loosen(trips, budget)
        loose = self._decided(trips)
        before, after = (simulate_index(self.facts, decisions) for decisions in (tight, loose))
        return loose if after.peak <= max(before.peak, budget) and after.seconds <= before.seconds else tight

    def _loosen(self, trips: Sequence[_Trip], budget: int) -> None:
        """Free later and fetch sooner, in the same order, without going over the budget at any moment."""
        levels = self.timeline.levels.copy()
        for trip in trips:
            levels[trip.away] -= trip.what.size
        slack = _SLACK * self.timeline.seconds
        earliest = self._ops
        for trip in sorted((trip for trip in trips if trip.what.returns), key=lambda trip: trip.fetch_at):
            wanted = max(self._last_begin(self._time_of(trip.fetch_at) - slack), earliest, trip.away.start)
            sooner = self._noticed[bisect_left(self._noticed, wanted) : bisect_left(self._noticed, trip.fetch_at)]
            for moment in reversed(sooner):
                between = slice(moment, trip.fetch_at)
                if levels[between].max() + trip.what.size > budget:
                    break
                levels[between] += trip.what.size
                trip.fetch_at = moment
            earliest = max(earliest, trip.fetch_at)
        for trip in trips:
            wanted = min(bisect_left(self._op_ends, self._op_ends[trip.free_at] + slack), self._ops - 1)
            while trip.free_at < wanted:
                grows_by = trip.what.size if trip.free_at + 1 > trip.what.held_until else 0
                if levels[trip.free_at + 1] + grows_by > budget:
                    break
                trip.free_at += 1
                levels[trip.free_at] += grows_by

    def _decided(self, trips: Sequence[_Trip]) -> dict[int, Decision]:
        decisions = dict.fromkeys(self.facts.decided, Keep()) | dict(self._decisions)
        last = len(self.facts.trace.events) - 1
        for trip in trips:
            decisions[trip.what.value] = Store(trip.free_at, min(max(trip.fetch_at - self._ops, 0), last))
        return decisions


def _noticed_moments(facts: Index) -> list[int]:
    """The moments of backward at which a session can begin a copy: when it unpacks a value that it recognises."""
    trace, first = facts.trace, len(facts.trace.ops)
    noticed = []
    for moment, event in enumerate(trace.events, start=first):
        op = trace.values[event.value].op if isinstance(event, Unpack) else None
        if op is not None and trace.ops[op].replayable:
            noticed.append(moment)
    return noticed or [first]
