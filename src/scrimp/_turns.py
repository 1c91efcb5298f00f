"""One thread at a time: when handles die, and when backward passes end, values are let go.

Both can happen anywhere, in any thread, also in the middle of our own bookkeeping.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Self

from torch.autograd import Variable

from scrimp._value import Value, release

if TYPE_CHECKING:
    from scrimp._scope import Scope


class Turns:
    """The lock under which values of one recording change hands, and what waits for it."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        """The innermost session now; operators are recorded under it."""
        self._lock = threading.RLock()
        self._depth = 0
        self._released: deque[Value] = deque()
        self._replayed: dict[int, set[Value]] = {}

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth == 1:
            if self._released:
                self._settle_released()
            if self.scope.outbox.asked:
                self.scope.outbox.send()
        self._depth -= 1
        self._lock.release()

    def release_handle(self, value: Value) -> None:
        """Take note that a handle died. That can happen anywhere, also in the middle of our own bookkeeping."""
        self._released.append(value)
        while self._released and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # whoever is at work here does it when done
                self._settle_released()
            finally:
                self._lock.release()

    def _settle_released(self) -> None:
        while self._released:
            value = self._released.popleft()
            value.handles -= 1
            if not value.handles and not value.external:
                made = value.scope.ledger.made
                made.leave(value.nbytes)
                if not made.count:
                    value.scope.forget_candidates()
            if value.passing and value.secured and not value.rooted:
                value.let_go()
            if not value.handles:
                value.settle()
                drop_if_stale(value)
            release(value)

    def drop_again_after(self, task: int, values: set[Value]) -> None:
        """When backward pass ``task`` is over, drop what it replayed and did not use up, as with ``retain_graph``."""
        if task not in self._replayed:
            self._replayed[task] = set()
            Variable._execution_engine.queue_callback(lambda: self._drop_again(task))
        self._replayed[task] |= values

    def _drop_again(self, task: int) -> None:
        with self:
            for value in self._replayed.pop(task):
                if value.tensor is not None and (value.secured or value.copy is not None) and not value.rooted:
                    value.let_go()
            self.scope.outbox.after_backward()


def drop_if_stale(value: Value) -> None:
    """Let go of what has been overwritten since, once no handle wants it."""
    if not value.handles:
        value.shown = None
        if value.stale and value.tensor is not None:
            value.let_go()
