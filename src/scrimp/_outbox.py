"""Values on their way to a store, from the moment that their policy says so until the device has its memory back.

The host runs ahead of a GPU, so a value cannot be let go when its copy has been *asked for*, and if the host waited for
the copy, nothing would run. Instead the device's own queue is told to wait for the copy at some later operator, and
there the value is let go: whatever is put into that memory afterwards stands behind in the same queue.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque

import torch
from torch import Tensor

from scrimp._value import Timing, Value, secure
from scrimp.store._lanes import unseen
from scrimp.store._store import Copy, Store


class Outbox:
    """What is leaving, of all scopes of one recorder."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.asked: list[Value] = []
        """Values that :meth:`send` is to see to."""
        self._unsure: deque[tuple[int, Value]] = deque()
        self._clock = 0
        self._due: dict[int, list[Value]] = {}
        """By operator, the values that a plan wants gone after it."""
        self._planned: dict[tuple[int, int], list[tuple[int, tuple[int, int], weakref.ref[Copy]]]] = {}
        """By the value that is unpacked then: how often it was in this pass, and whose copies a plan wants back."""
        self._turns: Counter[tuple[int, int]] = Counter()
        self._leaving: deque[Value] = deque()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        self._pass = -1

    def add(self, value: Value) -> None:
        """Take note of a value that is held now and wanted elsewhere."""
        self.asked.append(value)

    def add_input(self, value: Value) -> None:
        """Take note of a value from before the session whose bytes only a store may have soon."""
        self.inputs.append(value)

    def add_unsure(self, value: Value) -> None:
        """Take note of a value that was not made by an operator under our eyes.

        Some operators save memory before they fill it, unseen. So it is copied when the next operator is over.
        """
        self._unsure.append((self._clock + 1, value))

    def waits(self, sequence: int) -> bool:
        """Take note that operator number ``sequence`` is about to run, and say whether :meth:`tick` has work to do."""
        self._clock = sequence
        return bool(self.asked or self._unsure or self._due)

    def tick(self, sequence: int) -> None:
        """Do what is due before operator number ``sequence``."""
        while self._unsure and self._unsure[0][0] < sequence:
            self.asked.append(self._unsure.popleft()[1])
        for value in self._due.pop(sequence - 2, ()):
            self.finish(value)

    def send(self) -> None:
        """Begin to copy what was noted, and let go of what left before, as far as the window demands."""
        while self.asked:
            value = self.asked.pop()
            if value.store is not None and value.copy is None and _can_leave(value):
                self._put(value, value.store)

    def _put(self, value: Value, store: Store) -> None:
        assert value.tensor is not None
        value.copy = store.put(_bytes_of(value.tensor), scheduled=value.timing is not None)
        if value.copy is None:
            drop(value)
            return
        self._stores.add(store)
        if value.timing is not None:
            self._leaving.append(value)
            self._schedule(value, value.copy, value.timing)
            return
        if value.copy.at_once:
            _let_go(value)
            return
        self._leaving.append(value)
        unplanned = [one for one in self._leaving if one.tensor is not None and one.timing is None]
        on_the_way = sum(one.nbytes for one in unplanned)
        for oldest in unplanned:
            if on_the_way <= store.window and value.scope.room() != 0:
                break
            on_the_way -= oldest.nbytes
            self.finish(oldest)

    def _schedule(self, value: Value, copy: Copy, timing: Timing) -> None:
        self._due.setdefault(max(timing.free_at, self._clock - 1), []).append(value)
        if timing.fetch_at is not None:
            self._planned.setdefault(timing.fetch_at, []).append((timing.turn, value.place, weakref.ref(copy)))

    def finish(self, value: Value) -> None:
        """Have the device's queue wait for a value that is leaving, and let go of it; of any other, do nothing."""
        if self.asked:
            self.send()
        if value in self._leaving:
            self._leaving.remove(value)
            _let_go(value)

    def flush(self) -> None:
        """Finish everything."""
        self.asked.extend(value for _, value in self._unsure)
        self._unsure.clear()
        self.send()
        while self._leaving:
            _let_go(self._leaving.popleft())

    @property
    def is_used(self) -> bool:
        """Whether anything was ever sent."""
        return bool(self._stores)

    def begins(self, task: int) -> bool:
        """Tell whether backward pass ``task`` is a new one."""
        if task == self._pass:
            return False
        self._pass = task
        self._turns.clear()
        return True

    def before_backward(self) -> None:
        """What was stored last will soon be asked for."""
        for store in self._stores:
            store.prefetch_youngest()

    def before_unpacking(self, value: Value) -> None:
        """What a plan wants to be fetched at this point, is."""
        planned = self._planned.get(value.place)
        if planned:
            self._turns[value.place] += 1
            for turn, _, copy in sorted(planned, key=lambda one: one[1], reverse=True):  # the latest is needed first
                if turn == self._turns[value.place] and (there := copy()) is not None:
                    there.prefetch()

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
    value.copy.wait_until_left(value.tensor, value.stream)
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
