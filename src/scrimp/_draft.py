"""A trace in the making: what is known of a step while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scrimp._live import rounded
from scrimp._meter import Meter
from scrimp._standing import kind_of_module
from scrimp._trace import Event, Op, Release, Resident, Run, Trace, Unpack, Value


@dataclass(slots=True)
class DraftOp:
    """An operator of the forward pass, and the marks around it on the device's clock."""

    name: str
    module: str
    reads: tuple[int, ...]
    start: Any
    end: Any = None
    transient: int = 0
    replayable: bool = False
    saves: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DraftRun:
    """A backward node, and the marks around each of its operators."""

    name: str
    module: str
    marks: tuple[tuple[Any, Any], ...]
    peak: int
    net: int


@dataclass(slots=True)
class Draft:
    """What a step did so far.

    Attributes:
        spans: the ranges of ops that ran inside of what is going to be planned; what runs outside, such as a loss that
            is computed by the training loop, cannot be dropped by a plan.
        packed: elements of each tensor that autograd saved, in order, whatever it was.
        open_handles: how many of the saves that are written down autograd has not released.
        interleaved: the forward pass went on after backward had begun; a trace cannot say that.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[DraftOp] = field(default_factory=list)
    events: list[DraftRun | Unpack | Release] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    kept_for_good: set[int] = field(default_factory=set)
    open_handles: int = 0
    interleaved: bool = False

    @property
    def is_over(self) -> bool:
        """Whether backward has run, and autograd needs nothing of the step any more."""
        return bool(self.events) and not self.open_handles

    def forget_save(self, value: int) -> None:
        """Take back the latest save of a value."""
        for op in reversed(self.ops):
            if value in op.saves:
                op.saves.remove(value)
                self.open_handles -= 1
                return

    def dies(self, value: int, after: int) -> None:
        """Write down the last op during which somebody other than autograd held a value."""
        old = self.values[value]
        if old.op is not None and old.dies_after is None:
            self.values[value] = replace(old, dies_after=max(old.op, after))

    def finished(self, meter: Meter, resident: tuple[Resident, ...]) -> Trace:
        """Turn it into a trace."""
        meter.settle()
        newest = _newest_versions(self.values)
        seconds = self._seconds(meter)
        ops = [
            Op(op.name, op.module, op.reads, (), seconds[number], op.transient, op.replayable)
            for number, op in enumerate(self.ops)
        ]
        inside = [any(first <= number < end for first, end in self.spans) for number in range(len(ops))]
        values = [replace(value, nbytes=rounded(value.nbytes, meter.block)) for value in self.values]
        fixed = {values[number].op for number in self.kept_for_good}
        for number, op in enumerate(self.ops):
            for saved in op.saves:
                # Of an older version, what autograd saved holds the storage, and so the newest one.
                last = newest[saved]
                saved_at = number
                if last != saved:
                    saved_at = values[last].op or 0
                    fixed.add(saved_at)
                if not inside[number]:
                    fixed.add(values[last].op)  # a plan has no say in what is saved out there
                ops[saved_at] = replace(ops[saved_at], saves=(*ops[saved_at].saves, last))
        ops = [
            replace(op, replayable=op.replayable and inside[number] and number not in fixed)
            for number, op in enumerate(ops)
        ]
        return Trace(tuple(values), tuple(ops), self._events(newest, meter), resident)

    def _seconds(self, meter: Meter) -> list[float]:
        """Return the time of each op: the least that one of its kind took, since others may have waited for memory."""
        made: dict[int, list[int]] = {}
        for value in self.values:
            if value.op is not None:
                made.setdefault(value.op, []).append(value.nbytes)
        kinds = [
            (op.name, tuple(self.values[read].nbytes for read in op.reads), tuple(made.get(number, ())))
            for number, op in enumerate(self.ops)
        ]
        return _least(kinds, [meter.seconds(op.start, op.end) for op in self.ops])

    def _events(self, newest: Sequence[int], meter: Meter) -> tuple[Event, ...]:
        runs = [event for event in self.events if isinstance(event, DraftRun)]
        kinds = [(run.name, kind_of_module(run.module), run.peak, run.net, len(run.marks)) for run in runs]
        seconds = iter(_least(kinds, [sum(meter.seconds(*marks) for marks in run.marks) for run in runs]))
        return tuple(
            Run(event.name, event.module, next(seconds), event.peak, event.net)
            if isinstance(event, DraftRun)
            else replace(event, value=newest[event.value])
            for event in self.events
        )


def _least(kinds: Sequence[object], seconds: Sequence[float]) -> list[float]:
    """Return, for each thing, the least of those of its kind."""
    least: dict[object, float] = {}
    for kind, one in zip(kinds, seconds, strict=True):
        least[kind] = min(least.get(kind, one), one)
    return [least[kind] for kind in kinds]


def _newest_versions(values: Sequence[Value]) -> list[int]:
    """Return, for each value, the last one that was written into its storage."""
    newest = list(range(len(values)))
    for number in reversed(range(len(values))):
        old = values[number].overwrites
        if old is not None:
            newest[old] = newest[number]
    return newest
