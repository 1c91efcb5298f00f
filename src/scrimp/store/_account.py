"""What a store did: counted as it happens, handed out as frozen data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from scrimp._statistics import Counter, Tally

Span = float | tuple[torch.cuda.Event, torch.cuda.Event]
"""How long something took: seconds, or two moments of a device that knows later."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot of a store.

    Attributes:
        held: the copies in it: how many now, of how many bytes, the most bytes there were, and how many ever.
        bytes_out: bytes that were copied into it.
        bytes_in: bytes that were copied back to where they came from.
        seconds_out: how long the copies into it took.
        seconds_in: how long the copies back took.
        waited_seconds: how long the step stood still for it.
    """

    held: Tally
    bytes_out: int
    bytes_in: int
    seconds_out: float
    seconds_in: float
    waited_seconds: float

    @property
    def out_bandwidth(self) -> float:
        """Bytes per second into it; 0 before the first copy."""
        return self.bytes_out / self.seconds_out if self.seconds_out else 0.0

    @property
    def in_bandwidth(self) -> float:
        """Bytes per second back; 0 before the first copy."""
        return self.bytes_in / self.seconds_in if self.seconds_in else 0.0


class Timer:
    """Adds up spans. Those of a device are read once it is past them, so that nobody waits for a measurement."""

    _MANY = 256

    def __init__(self) -> None:
        self._seconds = 0.0
        self._later: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def add(self, span: Span) -> None:
        """Count a span; of one that ends before it begins, nothing."""
        if isinstance(span, float):
            self._seconds += max(0.0, span)
            return
        self._later.append(span)
        while len(self._later) > self._MANY and all(_is_past(event) for event in self._later[0]):
            self._read(*self._later.popleft())

    def total(self) -> float:
        """Return the seconds of all spans, after waiting for the last."""
        while self._later:
            begin, end = self._later.popleft()
            begin.synchronize()
            end.synchronize()
            self._read(begin, end)
        return self._seconds

    def _read(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds += max(0.0, begin.elapsed_time(end) / 1e3)


@dataclass(slots=True)
class Account:
    """The running account of one store."""

    held: Counter = field(default_factory=Counter)
    bytes_out: int = 0
    bytes_in: int = 0
    out: Timer = field(default_factory=Timer)
    back: Timer = field(default_factory=Timer)
    waited: Timer = field(default_factory=Timer)

    def snapshot(self) -> StoreStatistics:
        """Return the account as frozen data."""
        return StoreStatistics(
            held=self.held.tally(),
            bytes_out=self.bytes_out,
            bytes_in=self.bytes_in,
            seconds_out=self.out.total(),
            seconds_in=self.back.total(),
            waited_seconds=self.waited.total(),
        )


def _is_past(event: torch.cuda.Event) -> bool:
    past: bool = event.query()  # type: ignore[no-untyped-call]
    return past
