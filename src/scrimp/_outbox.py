"""Values on their way to a store, from the moment that their policy says so until the device has its memory back.

The host runs ahead of a GPU, so a value cannot be let go when its copy has been *asked for*, and if the host waited for
the copy, nothing would run. Instead the device's own queue is told to wait for the copy at some later operator, and
there the value is let go: whatever is put into that memory afterwards stands behind in the same queue.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from scrimp._value import Value, secure
from scrimp.store._lanes import unseen
from scrimp.store._store import Store


class Outbox:
    """What is leaving, of all scopes of one recorder."""

    def __init__(self) -> None:
        self._asked: list[Value] = []
        self._unsure: deque[tuple[int, Value]] = deque()
        self._clock = 0
        self._leaving: deque[Value] = deque()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        self._pass = -1

    def add(self, value: Value) -> None:
        """Take note of a value that is held now and wanted elsewhere."""
        self._asked.append(value)

    def add_unsure(self, value: Value) -> None:
        """Take note of a value that was not made by an operator under our eyes.

        Some operators save memory before they fill it, unseen. So it is copied when the next operator is over.
        """
        self._unsure.append((self._clock + 1, value))

    def tick(self, sequence: int) -> None:
        """Operator number ``sequence`` is about to run."""
        self._clock = sequence
        while self._unsure and self._unsure[0][0] < sequence:
            self._asked.append(self._unsure.popleft()[1])

    def send(self) -> None:
        """Begin to copy what was noted, and let go of what left before, as far as the window demands."""
        while self._asked:
            value = self._asked.pop()
            if value.store is not None and value.copy is None and _can_leave(value):
                self._put(value, value.store)

    def _put(self, value: Value, store: Store) -> None:
        assert value.tensor is not None
        value.copy = store.put(_bytes_of(value.tensor))
        if value.copy is None:
            drop(value)
            return
        self._stores.add(store)
        if value.copy.at_once:
            _let_go(value)
            return
        self._leaving.append(value)
        on_the_way = sum(one.nbytes for one in self._leaving if one.tensor is not None)
        while on_the_way > store.window:
            oldest = self._leaving[0]
            on_the_way -= oldest.nbytes if oldest.tensor is not None else 0
            self.finish(oldest)

    def finish(self, value: Value) -> None:
        """Have the device's queue wait for a value that is leaving, and let go of it; of any other, do nothing."""
        if self._asked:
            self.send()
        if value in self._leaving:
            self._leaving.remove(value)
            _let_go(value)

    def flush(self) -> None:
        """Finish everything."""
        self._asked.extend(value for _, value in self._unsure)
        self._unsure.clear()
        self.send()
        while self._leaving:
            _let_go(self._leaving.popleft())

    def begins(self, task: int) -> bool:
        """Tell whether backward pass ``task`` is a new one that may need what is stored."""
        if task in (self._pass, -1) or not self._stores:
            return False
        self._pass = task
        return True

    def before_backward(self) -> None:
        """What was stored last will soon be asked for."""
        for store in self._stores:
            store.prefetch_youngest()

    def after_backward(self) -> None:
        """A backward pass is over: what was fetched for it and not asked for goes."""
        for store in self._stores:
            store.stay_ahead_no_longer()


def _can_leave(value: Value) -> bool:
    return (
        value.tensor is not None
        and not value.stale
        and value.nbytes > 0
        and (value.demand > 0 or value.rooted)
        and value.device.type != "meta"
        and value.unchanged()
    )


def _let_go(value: Value) -> None:
    if value.copy is None or value.tensor is None:
        return
    value.copy.wait_until_left()
    if value.unchanged():
        value.let_go()
    else:
        # Written where nobody saw it: nobody can say what the copy holds, nor whether the write came before it.
        value.copy.discard()
        value.copy = value.store = None


def drop(value: Value) -> None:
    """There is no room for a value in its store: let go of it all the same, if it can be replayed."""
    value.store = None
    if value.call is not None and (value.secured or secure(value)):
        value.pinned = False
        value.let_go()


def _bytes_of(tensor: Tensor) -> Tensor:
    with unseen():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
