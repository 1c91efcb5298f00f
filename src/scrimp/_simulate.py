"""The referee: what a plan makes of a trace, byte by byte and second by second.

What a value costs is written down as **spans**: it is there at the start of every moment ``t`` with
``after < t <= until``. The bytes at the start of a moment are the sum over the spans that cover it; what a
moment needs on top of that (an op's outputs and transients, a backward node's own memory, a replay's worst
moment) is its inner peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._index import Index, index
from ._plan import Decision, Drop, Keep, Plan, Store
from ._replay_cost import needed_ops, replay_cost
from ._trace import Run, Trace, Unpack
from .errors import PlanError

__all__ = ["Span", "Timeline", "check_decisions", "hold_ends", "simulate", "simulate_index", "starts_unsaved"]


class Span(NamedTuple):
    """A value's bytes are there at the start of every moment ``t`` with ``after < t <= until``."""

    value: int
    after: int
    until: int


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A simulated step.

    Attributes:
        levels: most bytes on the device during each moment, everything included.
        begins: the second at which each moment begins.
        spans: when each value is there.
        own: bytes of backward's own (gradients) at the start of each moment.
        seconds: of the whole step.
        replay_seconds: the part of it that replays take.
        stall_seconds: the part of it spent waiting for copies.
    """

    levels: NDArray[np.int64]
    begins: NDArray[np.float64]
    spans: tuple[Span, ...]
    own: NDArray[np.int64]
    seconds: float
    replay_seconds: float
    stall_seconds: float

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        return int(self.levels.max())

    @property
    def peak_moment(self) -> int:
        """The first moment that reaches the peak."""
        return int(self.levels.argmax())


def simulate(trace: Trace, plan: Plan | Mapping[int, Decision] | None = None) -> Timeline:
    """What the step would use and take under a plan.

    Args:
        trace: the step.
        plan: a plan for this trace, or decisions by value id; values without one are kept. ``None``: keep
            everything.

    Raises:
        PlanError: when the plan is for another trace, or decides something impossible.

    Example:
        >>> from scrimp._trace import Op, Release, Run, Trace, Unpack, Value
        >>> trace = Trace(
        ...     values=(Value(8, op=None), Value(8, op=0, dies_after=1), Value(8, op=1, dies_after=1)),
        ...     ops=(Op("exp", "", (0,), (1,), 1.0), Op("sin", "", (1,), (2,), 1.0)),
        ...     events=(
        ...         *(Unpack(2), Run("b", "", 1.0, 0, 0), Release(2)),
        ...         *(Unpack(1), Run("a", "", 1.0, 0, 0), Release(1)),
        ...     ),
        ... )
        >>> simulate(trace).seconds, simulate(trace, {1: Drop()}).seconds
        (4.0, 5.0)
    """
    if isinstance(plan, Plan):
        if plan.fingerprint != trace.fingerprint():
            raise PlanError(f"The plan is for trace {plan.fingerprint}, this is {trace.fingerprint()}: plan it anew.")
        plan = plan.decisions
    facts = index(trace)
    check_decisions(facts, plan or {})
    return simulate_index(facts, plan or {})


def check_decisions(facts: Index, decisions: Mapping[int, Decision]) -> None:
    """Raise ``PlanError`` unless every decision can be carried out."""
    trace, decided = facts.trace, set(facts.decided)
    for value, decision in decisions.items():
        if value in facts.holdable and isinstance(decision, Keep):
            continue
        if value not in decided:
            raise PlanError(f"value {value} is not saved, or was there before the step: a plan leaves it out.")
        match decision:
            case Drop(passes) if value not in facts.droppable or passes < 0:
                raise PlanError(f"value {value} cannot be dropped, {passes=}: need a replayable op and passes >= 0.")
            case Store(free_at, prefetch_at):
                if not trace.out_bandwidth or not trace.in_bandwidth:
                    raise PlanError(f"value {value} cannot be stored: the trace has no store's bandwidths.")
                if not (facts.saved_at[value] <= free_at < len(trace.ops) and 0 <= prefetch_at < len(trace.events)):
                    raise PlanError(f"value {value}: cannot free after op {free_at}, fetch at event {prefetch_at}.")


def hold_ends(facts: Index, is_fixed: list[bool]) -> list[int]:
    """Per value, the last release that needs it: its own, or that of a dropped value replayed from it."""
    ends = list(facts.last_release)
    for op in range(len(facts.reads) - 1, -1, -1):
        if facts.replayable[op] and facts.reads[op]:
            demand = max((ends[value] for value in facts.outputs[op] if not is_fixed[value]), default=-1)
            for value in facts.reads[op]:
                ends[value] = max(ends[value], demand)
    return ends


def fixed_values(facts: Index, decisions: Mapping[int, Decision]) -> list[bool]:
    """Per value, whether replays start from it and never compute it: kept, stored, or not replayable."""
    fixed = [owner < 0 or not facts.replayable[owner] for owner in facts.owner]
    for value in facts.decided:
        fixed[value] = not isinstance(decisions.get(value), Drop)
    for value in facts.holdable & decisions.keys():
        fixed[value] = isinstance(decisions[value], Keep)
    return fixed


def starts_unsaved(facts: Index, decisions: Mapping[int, Decision]) -> set[int]:
    """The values that autograd does not save but a replay starts from: kept by the plan, or not replayable."""
    fixed = fixed_values(facts, decisions)
    ends = hold_ends(facts, fixed)
    return {
        value
        for value, owner in enumerate(facts.owner)
        if owner >= 0 and fixed[value] and facts.saved_at[value] < 0 and ends[value] >= 0
    }


def simulate_index(facts: Index, decisions: Mapping[int, Decision]) -> Timeline:
    """:func:`simulate` for decisions that are known to be possible."""
    machine = _Machine(facts, decisions)
    machine.forward()
    machine.backward()
    return machine.timeline()


class _Machine:
    """One simulated step in progress."""

    def __init__(self, facts: Index, decisions: Mapping[int, Decision]) -> None:
        self.facts = facts
        self.decisions = decisions
        self.fixed = fixed_values(facts, decisions)
        self.ends = hold_ends(facts, self.fixed)
        self.spans: list[Span] = []
        self.inner = [0] * facts.moments
        self.begins = [0.0] * facts.moments
        self.now = self.replay_seconds = self.stall_seconds = 0.0
        self.retained_until: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.engine_in = 0.0
        self.landed: dict[int, float] = {}

    def forward(self) -> None:
        facts, trace = self.facts, self.facts.trace
        stored: dict[int, list[tuple[int, Store]]] = {}
        freed: dict[int, list[int]] = {}
        for value, decision in self.decisions.items():
            if isinstance(decision, Store):
                stored.setdefault(facts.saved_at[value], []).append((value, decision))
                freed.setdefault(decision.free_at, []).append(value)
        engine_out = 0.0
        copied: dict[int, float] = {}
        for moment, op in enumerate(trace.ops):
            self.begins[moment] = self.now
            self.now += op.seconds
            self.inner[moment] = facts.fresh[moment] + op.transient
            for value, _ in sorted(stored.get(moment, ()), key=lambda pair: pair[0]):
                engine_out = max(self.now, engine_out) + facts.size[value] / trace.out_bandwidth
                copied[value] = engine_out
            for value in freed.get(moment, ()):
                self._wait_until(copied[value])
        for value, owner in enumerate(facts.owner):
            if owner >= 0 and facts.size[value]:
                self.spans.append(Span(value, owner, self._forward_end(value)))

    def _forward_end(self, value: int) -> int:
        natural = self.facts.natural_end[value]
        decision = self.decisions.get(value)
        if isinstance(decision, Store):
            return max(natural, decision.free_at)
        return max(natural, self.ends[value]) if self.fixed[value] else natural

    def backward(self) -> None:
        first = len(self.facts.trace.ops)
        prefetches: dict[int, list[int]] = {}
        for value, decision in self.decisions.items():
            if isinstance(decision, Store):
                prefetches.setdefault(first + decision.prefetch_at, []).append(value)
        for moment, event in enumerate(self.facts.trace.events, start=first):
            self.begins[moment] = self.now
            if moment in prefetches:
                for value in sorted(prefetches[moment], reverse=True):  # backward needs the latest first
                    if moment <= self.ends[value]:
                        self._fetch(value, moment)
            if isinstance(event, Run):
                self.now += event.seconds
                self.inner[moment] = event.peak
            elif isinstance(event, Unpack):
                self._unpack(event.value, moment)

    def _unpack(self, value: int, moment: int) -> None:
        if self.fixed[value]:
            self._arrive(value, moment)
        elif self.retained_until.get(value, -1) < moment:
            self._replay(value, moment)

    def _replay(self, target: int, moment: int) -> None:
        ops, starts = needed_ops(self.facts, target, lambda value: self._is_present(value, moment))
        for value in sorted(starts):
            self._arrive(value, moment)
        remaining = self._retain(ops, target, moment)
        cost = replay_cost(self.facts, ops, starts, remaining)
        self.inner[moment] = cost.peak
        self.now += cost.seconds
        self.replay_seconds += cost.seconds

    def _is_present(self, value: int, moment: int) -> bool:
        return self.fixed[value] or self.retained_until.get(value, -1) >= moment

    def _retain(self, ops: list[int], target: int, moment: int) -> set[int]:
        remaining: set[int] = set()
        for op in ops:
            for value in self.facts.outputs[op]:
                if self._is_present(value, moment) or self.facts.last_release[value] <= moment:
                    continue
                decision = self.decisions[value]
                assert isinstance(decision, Drop)
                self.computed[value] = self.computed.get(value, 0) + 1
                if self.computed[value] > decision.passes:
                    until = self.ends[value]
                elif value == target:
                    until = next((at for at in self.facts.releases[value] if at > moment), self.facts.moments)
                else:
                    continue
                remaining.add(value)
                self.retained_until[value] = until
                self.spans.append(Span(value, moment, until))
        return remaining

    def _arrive(self, value: int, moment: int) -> None:
        """A fixed value is about to be used: if it was stored, its copy must be back."""
        if isinstance(self.decisions.get(value), Store):
            self._fetch(value, moment)
            self._wait_until(self.landed[value])

    def _fetch(self, value: int, moment: int) -> None:
        if value in self.landed:
            return
        size = self.facts.size[value]
        self.engine_in = max(self.now, self.engine_in) + size / self.facts.trace.in_bandwidth
        self.landed[value] = self.engine_in
        self.spans.append(Span(value, moment - 1, self.ends[value]))

    def _wait_until(self, second: float) -> None:
        if second > self.now:
            self.stall_seconds += second - self.now
            self.now = second

    def timeline(self) -> Timeline:
        facts = self.facts
        change = np.zeros(facts.moments + 2, dtype=np.int64)
        count = len(self.spans)
        sizes = np.fromiter((facts.size[span.value] for span in self.spans), np.int64, count)
        np.add.at(change, np.fromiter((span.after + 1 for span in self.spans), np.int64, count), sizes)
        np.subtract.at(change, np.fromiter((span.until + 1 for span in self.spans), np.int64, count), sizes)
        nets = np.zeros(facts.moments + 1, dtype=np.int64)
        for moment, event in enumerate(facts.trace.events, start=len(facts.trace.ops)):
            if isinstance(event, Run):
                nets[moment + 1] = event.net
        own = np.cumsum(nets)[: facts.moments]
        resident = sum(part.nbytes for part in facts.trace.resident)
        start = resident + own + np.cumsum(change)[: facts.moments]
        return Timeline(
            levels=start + np.array(self.inner, dtype=np.int64),
            begins=np.array(self.begins),
            spans=tuple(self.spans),
            own=own,
            seconds=self.now,
            replay_seconds=self.replay_seconds,
            stall_seconds=self.stall_seconds,
        )
