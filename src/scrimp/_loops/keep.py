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
    slots: int | None
    budget: int | None
    stores: tuple[Store, ...] = ()
    shelf: Shelf = field(init=False)
    held: int | None = None
    """A state that is kept beside those of the schedule, because backward begins with it."""
    _online: Online | None = None
    _positions: frozenset[int] = frozenset()
    _outside: Outside = field(default_factory=Outside)
    _free: dict[int, int] = field(default_factory=dict)
    """Memory that is there anyway: that of the loop's arguments."""

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.stores)

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
            if gone is not None:
                self.shelf.drop(gone)
            self.shelf.put(step, self.complete(state))
        elif step in self._positions or step + 1 == self.length:
            self.shelf.put(step, self.complete(state))

    def finish(self, length: int) -> None:
        """Take note of where the loop ended."""
        self.length = length
        if self._online is None and length > 1 and length - 1 not in self._positions:
            self.held = length - 1

    def complete(self, state: Frame) -> Frame:
        """Add to a state what is to be known beside it to run on from there."""
        snapshot = self._outside.snapshot()
        own = {key: nbytes for key, nbytes in addresses(state.leaves).items() if key not in self._free}
        nbytes = sum(own.values()) + snapshot.nbytes
        near = self.shelf.near if self.stores else self.slots
        if self.budget is not None and near is not None and nbytes * near > self.budget:
            raise BudgetError(
                f"the budget of {format_bytes(self.budget)} has room for {near} states like the first that a "
                f"step returned, and a later state has {format_bytes(nbytes)}; raise it, or give slots=",
                smallest=nbytes * near,
            )
        return replace(state, snapshot=snapshot, nbytes=nbytes)

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
        if self.budget is None and self.stores:
            return 1
        if self.budget is None:
            assert self.length is not None, "a loop of unknown length has a budget"
            return slots_for(self.length, TIMES)
        # Beside the first state, which is free, one is the current one; that makes the number the same again.
        slots = self.budget // nbytes if nbytes else 1 << 30
        if slots < 1:
            raise BudgetError(
                f"one state of the loop has {format_bytes(nbytes)}, the budget for all that are kept is "
                f"{format_bytes(self.budget)}; raise it to that at least",
                smallest=nbytes,
            )
        return slots

    def _slots_in_stores(self, nbytes: int) -> int:
        unbounded = any(store.limit is None for store in self.stores)
        return 1 << 30 if unbounded else sum((store.limit or 0) // max(nbytes, 1) for store in self.stores)
