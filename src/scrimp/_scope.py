"""Scopes: one entry into a session, its policy at work."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from scrimp._statistics import Ledger
from scrimp._value import Value, secure
from scrimp.policy import DROP, Candidate, Policy


@dataclass(slots=True)
class Control:
    """What a session's user can set, and its account; shared by all its scopes."""

    policy: Policy
    verify: bool
    enabled: bool = True
    decided: int = 0
    ledger: Ledger = field(default_factory=Ledger)


class Scope:
    """One entry into a session. Scopes of sessions within sessions form a tree."""

    __slots__ = ("_evictable", "_pushed", "_unrated", "control", "ledger", "parent")

    def __init__(self, control: Control, parent: Scope | None) -> None:
        self.control = control
        self.ledger = control.ledger
        self.parent = parent
        self._evictable: list[tuple[float, int, Value]] = []
        self._pushed = 0
        self._unrated: list[Value] = []

    def line(self) -> Iterator[Scope]:
        """Yield this scope and those around it, from the inside out."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def around(self, other: Scope) -> Scope:
        """Return the innermost scope that surrounds both."""
        if other is self:
            return self
        others = set(other.line())
        return next(scope for scope in self.line() if scope in others)

    # -- deciding ---------------------------------------------------------------------------------------------------

    def decide(self, value: Value) -> None:
        """Ask the policy about a value, once; ``value.pinned`` has the answer."""
        if value.decided:
            return
        value.number = self.control.decided
        self.control.decided += 1
        value.decided = True
        value.pinned = not self.control.enabled or self.control.policy.decide(Candidate(value)) is not DROP
        value.move_to(self)

    # -- evicting ---------------------------------------------------------------------------------------------------

    def offer(self, value: Value) -> None:
        """Add a kept value to those that can be evicted."""
        if self.control.policy.budget is not None and value.call is not None:
            self._unrated.append(value)

    def _rate(self) -> None:
        """Find the worth of what was offered since the budget was last full."""
        for value in self._unrated:
            if value.tensor is not None and value.call is not None:
                self._pushed += 1
                heapq.heappush(self._evictable, (self._worth(value), self._pushed, value))
        self._unrated.clear()

    def _worth(self, value: Value) -> float:
        return self.control.policy.worth(Candidate(value))

    def _excess(self) -> int:
        budget = self.control.policy.budget
        return 0 if budget is None else self.ledger.kept.bytes - budget

    def room(self) -> int | None:
        """Return how many bytes may still be kept; None means any number."""
        return None if self.control.policy.budget is None else max(0, -self._excess())

    def make_room(self) -> None:
        """Evict until the budget holds: the least worthy first, as many as it takes, none that is not needed."""
        while (excess := self._excess()) > 0:
            chosen = self._choose(excess)
            if not chosen:
                return  # nothing left that could be had again: what is kept now, backward cannot do without
            for value in chosen:
                # Where a source is gone the value cannot be replayed; it is no candidate any more, and stays.
                if value.secured or secure(value):
                    value.let_go(evicted=True)

    def _choose(self, excess: int) -> list[Value]:
        chosen: list[Value] = []
        found = 0
        self._rate()
        while found < excess and self._evictable:
            worth, _, value = heapq.heappop(self._evictable)
            if value.tensor is None or value.call is None or not value.handles or value in chosen:
                continue
            now = self._worth(value)
            if now > worth and self._evictable and now > self._evictable[0][0]:
                self._pushed += 1  # evicting others has made it dearer than the next
                heapq.heappush(self._evictable, (now, self._pushed, value))
                continue
            chosen.append(value)
            found += value.nbytes
        for value in sorted(chosen, key=lambda one: -one.nbytes):
            if found - value.nbytes >= excess:
                chosen.remove(value)
                found -= value.nbytes
                self.offer(value)
        return chosen
