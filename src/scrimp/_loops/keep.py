"""Keeping states on the way forward, as the schedule says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from scrimp._budget import format_bytes
from scrimp._loops.outside import Outside
from scrimp._loops.schedule import Online, slots_for, sweep
from scrimp._loops.shelf import Shelf
from scrimp._loops.step import Frame, addresses
from scrimp.errors import BudgetError
from scrimp.store import Store

TIMES = 2
"""Without a budget, so many states are kept that no step is advanced over more often than this, all in all."""


@final
@dataclass(slots=True)
class Keeper:
    """The kept states of one loop, by step."""

    length: int | None
    most: int | None
    """No loop is longer than that, where ``length`` is not known."""
    slots: int | None
    budget: int | None
    stores: tuple[Store, ...] = ()
    shelf: Shelf = field(init=False)
    held: int | None = None
    """A state that is kept beside those of the schedule, because backward begins with it."""
    largest: int = 0
    """Bytes of the largest state that was to be kept."""
    _online: Online | None = None
    _positions: frozenset[int] = frozenset()
    _outside: Outside = field(default_factory=Outside)
    _free: dict[int, int] = field(default_factory=dict)
    """Memory that is there anyway: that of the loop's arguments."""

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.stores, self.budget)

    def start(self, state: Frame, xs: Sequence[Any], outside: Outside) -> None:
        """Begin with the first state, which costs nothing: the caller has it."""
        self._outside = outside
        self._free = addresses((*state.leaves, *xs))
        self.shelf.stays = self._free
        self.shelf.first(replace(state, snapshot=outside.snapshot()))

    def arrive(self, step: int, state: Frame) -> None:
        """Keep the state before ``step`` if the schedule says so."""
        if step == 0:
            return
        if step == 1:
            self._schedule(self.complete(state).nbytes)
        if self._online is not None:
            gone = self._online.arrive(step)
            if gone is not None and gone in self.shelf:
                self.shelf.drop(gone)
            self._put(step, state)
        elif step in self._positions or step + 1 == self.length:
            self._put(step, state)

    def _put(self, step: int, state: Frame) -> None:
        """Keep a state if there is room; where states grow, fewer are kept than the schedule says."""
        frame = self.complete(state)
        if self.shelf.has_room(frame.nbytes):
            self.shelf.put(step, frame)

    def finish(self, length: int) -> None:
        """Take note of where the loop ended."""
        self.length = length
        if self._online is None and length > 1 and length - 1 not in self._positions and length - 1 in self.shelf:
            self.held = length - 1

    def slots_left(self, saved: int) -> int:
        """Return how many states backward may keep at a time; ``saved`` are kept already."""
        slots = max(self.slots or 1, saved)
        if self.budget is None or self.stores or not self.largest:
            return slots
        return min(slots, 1 + self.budget // self.largest)

    def complete(self, state: Frame) -> Frame:
        """Add to a state what is to be known beside it to run on from there."""
        snapshot = self._outside.snapshot()
        own = {key: nbytes for key, nbytes in addresses(state.leaves).items() if key not in self._free}
        nbytes = sum(own.values()) + snapshot.nbytes
        self.largest = max(self.largest, nbytes)
        if self.budget is not None and nbytes > self.budget:
            raise BudgetError(
                f"a state of the loop has {format_bytes(nbytes)}, the budget for all that are kept is "
                f"{format_bytes(self.budget)}; raise it to that at least",
                smallest=nbytes,
            )
        return Frame(state.leaves, state.wants, state.versions, snapshot, nbytes)

    def _schedule(self, nbytes: int) -> None:
        near = self.slots if self.slots is not None else self._slots(nbytes)
        self.slots = near + self._slots_in_stores(nbytes)
        if self.stores:
            self.shelf.near = near
        if self.length is None:
            self._online = Online(self.slots)
        else:
            self._positions = frozenset(sweep(self.length, self.slots))

    def _slots(self, nbytes: int) -> int:
        if self.budget is not None:
            # Beside the first state, which is free, one is the current one; that makes the number the same again.
            return self.budget // nbytes if nbytes else 1 << 30
        if self.stores:
            return 1
        most = self.length or self.most
        assert most is not None, "a loop of unknown length has a budget"
        return slots_for(most, TIMES)

    def _slots_in_stores(self, nbytes: int) -> int:
        unbounded = any(store.limit is None for store in self.stores)
        return 1 << 30 if unbounded else sum((store.limit or 0) // max(nbytes, 1) for store in self.stores)
