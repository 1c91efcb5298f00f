"""Scopes: one entry into a session, its policy at work."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from scrimp._outbox import Outbox
from scrimp._statistics import Ledger
from scrimp._value import Value, secure
from scrimp.policy import DROP, KEEP, Candidate, Decision, Policy

if TYPE_CHECKING:
    from scrimp._replay import Replay


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

    __slots__ = ("_evictable", "_rated", "_unrated", "control", "ledger", "outbox", "parent")

    def __init__(self, control: Control, parent: Scope | None) -> None:
        self.control = control
        self.ledger = control.ledger
        self.parent = parent
        self.outbox: Outbox = parent.outbox if parent else Outbox()
        self._evictable: list[tuple[float, int, Value]] = []
        self._rated = 0
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
        """Ask the policy about a value, once; ``value.pinned`` and ``value.store`` have the answer."""
        if value.decided:
            return
        control = self.control
        value.number = control.decided
        control.decided += 1
        value.decided = True
        policy, candidate = control.policy, Candidate(value)
        answer = policy.decide(candidate) if control.enabled else KEEP
        value.pinned = answer is not DROP
        value.store = None if isinstance(answer, Decision) else answer
        if value.store is not None:
            value.timing = policy.timing(candidate)
            if value.tensor is not None:
                self.outbox.add(value)
        value.passes = 0 if value.pinned else policy.passes(candidate)
        if value.scope is not self:
            value.move_to(self)

    def place_opaque(self, value: Value) -> None:
        """Ask the policy where a value goes that autograd saves and nobody can replay."""
        if self.control.enabled and not value.external and value.store is None and value.copy is None:
            value.store = self.control.policy.opaque(Candidate(value))
            if value.store is not None:
                value.timing = self.control.policy.timing(Candidate(value))
                self.outbox.add_unsure(value)

    def place_input(self, value: Value, tensor: Tensor) -> None:
        """Ask the policy where an activation goes that was made before the session; others hold anything else."""
        base = tensor if tensor._base is None else tensor._base
        if self.control.enabled and base.grad_fn is not None:
            value.store = self.control.policy.inputs()
            if value.store is not None:
                self.outbox.add_input(value)

    # -- evicting ---------------------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """Return how many bytes may still be kept; None means any number."""
        budget = self.control.policy.budget
        return None if budget is None else max(0, budget - self.ledger.kept.bytes)

    def admit(self, value: Value) -> bool:
        """Make room for a value that is about to be kept. False means that it is itself the least worthy.

        Over the budget, the least worthy values are evicted: as many as it takes, and none that is not needed.
        """
        if self.control.policy.budget is None or value.call is None:
            return True
        self._unrated.append(value)
        while (excess := self._excess(value)) > 0:
            chosen = self._choose(excess, value)
            if value in chosen:
                value.store = self.control.policy.evicted(Candidate(value))
                if value.store is not None:
                    return True  # it leaves as soon as it is held
                if value.secured or secure(value):
                    return False
            gone = [one for one in chosen if one is not value and self._send_or_drop(one)]
            if not gone:
                break  # of what is kept, nothing is left that could be had again
        return True

    def forget_candidates(self) -> None:
        """Let go of the values that could be evicted, once autograd needs none of them any more."""
        self._unrated.clear()
        self._evictable.clear()

    def _send_or_drop(self, value: Value) -> bool:
        """Send a kept value away, or drop it; tell whether it is gone."""
        if value.copy is None:
            value.store = self.control.policy.evicted(Candidate(value))
            if value.store is not None:
                self.outbox.add(value)
                self.outbox.finish(value)
        if value.tensor is not None and (value.copy is not None or value.secured or secure(value)):
            value.let_go(evicted=value.copy is None)
        return value.tensor is None

    def offer(self, value: Value) -> None:
        """Add a value that is kept again, after a replay, to those that can be evicted."""
        if self.control.policy.budget is not None:
            self._unrated.append(value)

    def room_for(self, replay: Replay) -> AbstractContextManager[None]:
        """Have room for a replay that runs inside the block. There is nothing to do unless a device is watched."""
        return nullcontext() if self.parent is None else self.parent.room_for(replay)

    def land(self, nbytes: int, beside: Set[Value]) -> None:
        """Have room for a value that is about to come back from a store, without taking away those ``beside`` it."""

    def landed(self, tensor: Tensor) -> None:
        """Take note of memory that a value came back to."""

    def _excess(self, coming: Value) -> int:
        budget = self.control.policy.budget
        return 0 if budget is None else self.ledger.kept.bytes + coming.nbytes - budget

    def _rate(self, value: Value) -> None:
        self._rated += 1
        worth = self.control.policy.worth(Candidate(value))
        heapq.heappush(self._evictable, (worth, self._rated, value))

    def _choose(self, excess: int, coming: Value | None) -> list[Value]:
        """Pick the least worthy values that together have at least ``excess`` bytes."""
        # Nothing is rated before a budget is full for the first time.
        for value in self._unrated:
            if value.call is not None:
                self._rate(value)
        self._unrated.clear()
        chosen: list[Value] = []
        found = 0
        while found < excess and self._evictable:
            worth, _, value = heapq.heappop(self._evictable)
            gone = value is not coming and (value.tensor is None or not value.handles)
            if gone or value.call is None or value in chosen:
                continue
            if self._evictable and self.control.policy.worth(Candidate(value)) > max(worth, self._evictable[0][0]):
                self._rate(value)  # evicting others has made it dearer than the next
                continue
            chosen.append(value)
            found += value.nbytes
        for value in sorted(chosen, key=lambda one: -one.nbytes):
            if found - value.nbytes >= excess:
                chosen.remove(value)
                found -= value.nbytes
                self._rate(value)
        return chosen
