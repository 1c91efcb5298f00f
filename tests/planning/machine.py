"""A naive abstract machine: the executor's semantics spelled out, with nothing incremental.

It decides at every moment, from scratch, which copies of which values are on the device, and adds up their
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scrimp._plan import Decision, Drop, Keep, Store
from scrimp._trace import Release, Run, Trace, Unpack


@dataclass
class Machine:
    """Runs a trace under decisions; ``levels`` and ``seconds`` are the result."""

    trace: Trace
    decisions: Mapping[int, Decision]
    levels: list[int] = field(default_factory=list)
    now: float = 0.0
    own: int = 0
    open_handles: dict[int, int] = field(default_factory=dict)
    retained: dict[int, bool] = field(default_factory=dict)  # value -> whether for good
    times_computed: dict[int, int] = field(default_factory=dict)
    fetched: dict[int, float] = field(default_factory=dict)
    out_free: float = 0.0
    in_free: float = 0.0
    copied: dict[int, float] = field(default_factory=dict)

    def run(self) -> Machine:
        """The whole step."""
        self.out_free = self.in_free = 0.0
        for moment in range(len(self.trace.ops)):
            self.forward_op(moment)
        for number in range(len(self.trace.events)):
            self.event(number)
        return self

    def decision(self, value: int) -> Decision:
        """What the plan says."""
        return self.decisions.get(value, Keep())

    def is_before_step(self, value: int) -> bool:
        """Whether the value's storage was there before the step."""
        made = self.trace.values[value]
        return made.op is None or (made.overwrites is not None and self.is_before_step(made.overwrites))

    def is_replayable(self, op: int) -> bool:
        """Whether running the op again is possible and gives the same."""
        return self.trace.ops[op].replayable and not any(
            any(other.overwrites == read for other in self.trace.values)
            and (self.trace.values[read].op is None or not self.is_replayable(self.trace.values[read].op or 0))
            for read in self.trace.ops[op].reads
        )

    def is_saved(self, value: int) -> bool:
        """Whether autograd saves it."""
        return any(value in op.saves for op in self.trace.ops)

    def is_start(self, value: int) -> bool:
        """Whether replays begin at this value whatever the moment."""
        op = self.trace.values[value].op
        if op is None or not self.is_replayable(op):
            return True
        if self.is_saved(value):
            return not isinstance(self.decision(value), Drop)
        return isinstance(self.decisions.get(value), Keep)

    def starts_of(self, value: int) -> set[int]:
        """Everything that a replay of ``value`` could start from, were nothing retained."""
        found: set[int] = set()
        for read in self.trace.ops[self.trace.values[value].op or 0].reads:
            found |= {read} if self.is_start(read) else self.starts_of(read)
        return found

    def is_wanted(self, value: int, moment: int) -> bool:
        """Whether it, or a dropped value that starts from it, has an open handle or will yet have one."""
        return any(
            self.handles_left(other, moment) > 0
            and (other == value or (not self.is_start(other) and value in self.starts_of(other)))
            for other in range(len(self.trace.values))
        )

    def is_demanded(self, value: int, moment: int) -> bool:
        """Whether it, or a dropped value that is computed from it, has open handles."""
        return self.handles_left(value, moment) > 0 or any(
            made.op is not None
            and value in self.trace.ops[made.op].reads
            and not self.is_start(other)
            and self.is_demanded(other, moment)
            for other, made in enumerate(self.trace.values)
        )

    def handles_left(self, value: int, moment: int) -> int:
        """Handles not released before the moment, made or yet to be made."""
        total = sum(op.saves.count(value) for op in self.trace.ops)
        past = self.trace.events[: max(0, moment - len(self.trace.ops))]
        return total - sum(1 for event in past if event == Release(value))

    def level(self, moment: int) -> int:
        """Bytes at the start of a moment."""
        total = self.own + sum(part.nbytes for part in self.trace.resident)
        for value, made in enumerate(self.trace.values):
            if made.op is None or self.is_before_step(value):
                continue
            copies = int(self.original_is_there(value, moment)) + (value in self.retained) + self.landed(value, moment)
            total += made.nbytes * copies
        return total

    def landed(self, value: int, moment: int) -> int:
        """Copies back from the store."""
        return int(value in self.fetched and self.is_wanted(value, moment))

    def original_is_there(self, value: int, moment: int) -> bool:
        """Whether the copy that forward made is there at the moment's start."""
        made = self.trace.values[value]
        assert made.op is not None
        if moment <= made.op:
            return False
        if made.dies_after is None or moment <= made.dies_after:
            return True
        if not self.is_start(value):
            return False
        decision = self.decision(value)
        if isinstance(decision, Store):
            return moment <= decision.free_at
        return self.is_wanted(value, moment)

    def allocated(self, op: int) -> int:
        """Bytes of the storages that the op makes."""
        return sum(
            value.nbytes
            for number, value in enumerate(self.trace.values)
            if value.op == op and value.overwrites is None and not self.is_before_step(number)
        )

    def forward_op(self, moment: int) -> None:
        """One op of the forward pass."""
        op = self.trace.ops[moment]
        self.levels.append(self.level(moment) + self.allocated(moment) + op.transient)
        self.now += op.seconds
        for value in sorted(set(op.saves)):
            first = not any(value in earlier.saves for earlier in self.trace.ops[:moment])
            if first and isinstance(self.decisions.get(value), Store):
                self.out_free = max(self.out_free, self.now)
                self.out_free += (
                    self.trace.values[value].nbytes * (not self.is_before_step(value)) / self.trace.out_bandwidth
                )
                self.copied[value] = self.out_free
        for value, decision in self.decisions.items():
            if isinstance(decision, Store) and decision.free_at == moment:
                self.now = max(self.now, self.copied[value])

    def event(self, number: int) -> None:
        """One event of the backward pass."""
        moment = len(self.trace.ops) + number
        for value, decision in sorted(self.decisions.items(), reverse=True):
            if isinstance(decision, Store) and decision.prefetch_at == number and self.is_wanted(value, moment):
                self.fetch(value)
        match self.trace.events[number]:
            case Run() as node:
                level = self.level(moment) + node.peak
                self.now += node.seconds
                self.own += node.net
            case Unpack(value):
                if self.is_start(value):
                    self.use(value)
                    level = self.level(moment)
                elif value in self.retained:
                    level = self.level(moment)
                else:
                    level = self.replay(value, moment)
            case Release(value):
                level = self.level(moment)
                if not self.retained.get(value, True):
                    del self.retained[value]
                for other in list(self.retained):
                    if not self.is_demanded(other, moment + 1):
                        del self.retained[other]
        self.levels.append(level)

    def fetch(self, value: int) -> None:
        """Begin the copy back from the store."""
        if value not in self.fetched:
            nbytes = self.trace.values[value].nbytes * (not self.is_before_step(value))
            self.in_free = max(self.in_free, self.now) + nbytes / self.trace.in_bandwidth
            self.fetched[value] = self.in_free

    def use(self, value: int) -> None:
        """Wait for the copy back, where there is one."""
        if isinstance(self.decisions.get(value), Store):
            self.fetch(value)
            self.now = max(self.now, self.fetched[value])

    def needed(self, value: int) -> set[int]:
        """The ops that compute the value from what is present."""
        op = self.trace.values[value].op
        assert op is not None
        ops = {op}
        for read in self.trace.ops[op].reads:
            if not self.is_start(read) and read not in self.retained:
                ops |= self.needed(read)
        return ops

    def replay(self, target: int, moment: int) -> int:
        """Replay; returns the highest level on the way. Every copy made is one entry of ``here``."""
        ops = sorted(self.needed(target))
        for value in sorted({read for op in ops for read in self.trace.ops[op].reads if self.is_start(read)}):
            self.use(value)
        base = highest = self.level(moment)
        present_before = set(self.retained)
        here: dict[int, int] = {}
        keep: set[int] = set()
        for position, op in enumerate(ops):
            self.now += self.trace.ops[op].seconds
            highest = max(highest, base + sum(here.values()) + self.allocated(op) + self.trace.ops[op].transient)
            for value, made in enumerate(self.trace.values):
                if made.op == op:
                    if made.overwrites is not None:
                        del here[made.overwrites]
                    here[value] = made.nbytes
                    if self.retains(value, target, moment, present_before):
                        keep.add(value)
            later = {
                read
                for other in ops[position + 1 :]
                for read in self.trace.ops[other].reads
                if not self.is_start(read) and read not in present_before
            }
            for value in list(here):
                if value not in later and value not in keep:
                    del here[value]
        return highest

    def retains(self, value: int, target: int, moment: int, present_before: set[int]) -> bool:
        """Count a computation; whether the value stays."""
        if self.is_start(value) or value in present_before or not self.handles_left(value, moment):
            return False
        decision = self.decisions[value]
        assert isinstance(decision, Drop)
        self.times_computed[value] = self.times_computed.get(value, 0) + 1
        if self.times_computed[value] > decision.passes:
            self.retained[value] = True
        elif value == target:
            self.retained[value] = False
        return value in self.retained
