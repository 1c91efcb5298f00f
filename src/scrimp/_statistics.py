"""What a session did: counted as it happens, handed out as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto


@dataclass(frozen=True, slots=True)
class Tally:
    """Values in one state: how many there are now, of how many bytes, the most bytes there were, and how many ever."""

    count: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of a session.

    A *value* is the content of one storage. ``made`` are those that autograd saved and still needs; ``kept`` are all
    whose bytes the session holds: saved ones, and others that replays start from. Parameters, inputs and anything else
    that was there before the session do not count, since the session cannot free them. ``stored`` are values whose
    bytes are in a store and not on the device. ``evicted`` are values that were kept first and dropped later; they are
    among ``dropped`` too.

    A session under ``KeepAll`` records no operators. All that it can tell from what the forward pass made are
    parameters, so it counts inputs that autograd saves.
    """

    made: Tally
    kept: Tally
    dropped: Tally
    stored: Tally
    evicted: Tally
    budget: int | None
    replayed_operators: int
    replayed_seconds: float

    @property
    def budget_used(self) -> float | None:
        """Kept bytes as a fraction of the budget, or None without a budget."""
        return None if self.budget is None else self.kept.bytes / max(self.budget, 1)


class State(IntEnum):  # the hash of an Enum is computed in Python
    """Where a value's bytes are, as far as scrimp is concerned."""

    ABSENT = auto()
    KEPT = auto()
    DROPPED = auto()
    EVICTED = auto()
    STORED = auto()


@dataclass(slots=True)
class Counter:
    """A :class:`Tally` in the making."""

    count: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    total: int = 0

    def enter(self, nbytes: int) -> None:
        """Add a value."""
        self.count += 1
        self.total += 1
        self.bytes += nbytes
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes

    def leave(self, nbytes: int) -> None:
        """Take a value out."""
        self.count -= 1
        self.bytes -= nbytes

    def tally(self) -> Tally:
        """Return it as frozen data."""
        return Tally(self.count, self.bytes, self.peak_bytes, self.total)


@dataclass(slots=True)
class Ledger:
    """The running account of one session."""

    made: Counter = field(default_factory=Counter)
    kept: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    evicted: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)
    replayed_operators: int = 0
    replayed_seconds: float = 0.0
    _of: dict[State, tuple[Counter, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._of = {
            State.ABSENT: (),
            State.KEPT: (self.kept,),
            State.DROPPED: (self.dropped,),
            State.EVICTED: (self.dropped, self.evicted),
            State.STORED: (self.stored,),
        }

    def move(self, nbytes: int, before: State, after: State) -> None:
        """Move a value of ``nbytes`` from one state to another."""
        if before is not State.ABSENT:
            for counter in self._of[before]:
                counter.leave(nbytes)
        for counter in self._of[after]:
            counter.enter(nbytes)

    def snapshot(self, budget: int | None) -> Statistics:
        """Return the account as frozen data."""
        return Statistics(
            made=self.made.tally(),
            kept=self.kept.tally(),
            dropped=self.dropped.tally(),
            stored=self.stored.tally(),
            evicted=self.evicted.tally(),
            budget=budget,
            replayed_operators=self.replayed_operators,
            replayed_seconds=self.replayed_seconds,
        )
