"""Where kept states are: the latest on the device, those before them in stores.

The states of a schedule are a stack. The lower one of them is, the longer it lies there and the less often it is asked
for; so what the device has no room for is taken from the bottom.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from scrimp._geometry import Geometry, geometry_of, is_plain, look
from scrimp._loops.patience import Patience
from scrimp._loops.step import Frame
from scrimp._streams import stream_of
from scrimp.errors import BudgetError
from scrimp.store import Copy, Store


@final
class Parked:
    """A state whose memory is in a store; the store's copies go with the last reference to it."""

    def __init__(self, frame: Frame, copies: dict[int, Copy], places: list[tuple[int, Geometry] | None]) -> None:
        self.frame = frame
        """The state, with None for what is in the store."""
        self._copies = copies
        self._places = places

    def fetched(self) -> Frame:
        """Return the state, on the device."""
        memories = {address: copy.fetch() for address, copy in self._copies.items()}
        made: dict[int, Tensor] = {}  # what was one tensor in two places is one again
        leaves = list(self.frame.leaves)
        for place, noted in enumerate(self._places):
            if noted is not None:
                address, geometry = noted
                if id(noted) not in made:
                    made[id(noted)] = look(memories[address], geometry)
                leaves[place] = made[id(noted)]
        versions = tuple(leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves)
        return replace(self.frame, leaves=leaves, versions=versions)

    def __del__(self) -> None:
        with Patience():
            for copy in self._copies.values():
                copy.discard()


def parked(frame: Frame, store: Store, stays: Container[int]) -> Parked | None:
    """Put the memory of a state into a store, all but what ``stays`` where it is; None where there is no room."""
    copies: dict[int, Copy] = {}
    places: dict[int, tuple[int, Geometry]] = {}
    for leaf in frame.leaves:
        if not isinstance(leaf, Tensor) or not is_plain(leaf):
            continue
        memory = leaf.untyped_storage()
        if memory._cdata in stays or not memory.nbytes():
            continue
        places.setdefault(id(leaf), (memory._cdata, geometry_of(leaf)))
        if memory._cdata not in copies:
            content = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(memory)
            copy = store.put(content, scheduled=True)
            if copy is None:
                for one in copies.values():
                    one.discard()
                return None
            copy.wait_until_left(content, stream_of(leaf.device))
            copies[memory._cdata] = copy
    noted = [places.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in frame.leaves]
    left = [leaf if place is None else None for leaf, place in zip(frame.leaves, noted, strict=True)]
    return Parked(replace(frame, leaves=left), copies, noted)


@final
class Shelf:
    """The kept states of one loop, by step."""

    def __init__(self, stores: Sequence[Store], room: int | None) -> None:
        self._room = room
        """Bytes that states beside the first may have on the device; None: as many as they like."""
        self.near: int | None = None
        """How many states beside the first may be on the device; None: all."""
        self.stays: Container[int] = ()
        """Memory that is there anyway, and is never put into a store."""
        self._stores = stores
        self._frames: dict[int, Frame | Parked] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._frames

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._frames))

    def copy(self) -> Shelf:
        """Return another shelf with the same states; what is taken from one stays on the other."""
        other = Shelf(self._stores, self._room)
        other.near, other.stays = self.near, self.stays
        other._frames = dict(self._frames)
        return other

    def has_room(self, nbytes: int) -> bool:
        """Tell whether one more state can be kept. With stores there is room as long as those take what is there."""
        return self._room is None or bool(self._stores) or self._nbytes() + nbytes <= self._room

    def _nbytes(self) -> int:
        return sum(one.nbytes for step, one in self._frames.items() if step and isinstance(one, Frame))

    def put(self, step: int, frame: Frame) -> None:
        """Keep a state; over the limit, the lowest on the device goes into a store."""
        self._frames[step] = frame
        self.settle()

    def settle(self) -> None:
        """Put into stores what is over the limits."""
        if self.near is None or not self._stores:
            return
        for step in sorted(self._frames):
            frame = self._frames[step]
            if step and isinstance(frame, Frame) and self._is_over():
                self._frames[step] = self._parked(frame)

    def _is_over(self) -> bool:
        here = sum(isinstance(one, Frame) for step, one in self._frames.items() if step)
        return here > (self.near or 0) or (self._room is not None and self._nbytes() > self._room)

    def first(self, frame: Frame) -> None:
        """Say what the first state is, which is never put into a store."""
        self._frames[0] = frame

    def take(self, step: int) -> Frame:
        """Return a state, which stays kept."""
        found = self._frames[step]
        return found if isinstance(found, Frame) else found.fetched()

    def drop(self, step: int) -> None:
        """Forget a state."""
        del self._frames[step]

    def clear(self) -> None:
        """Forget all states."""
        self._frames.clear()

    def _parked(self, frame: Frame) -> Parked:
        for store in self._stores:
            found = parked(frame, store, self.stays)
            if found is not None:
                return found
        raise BudgetError(
            f"the stores of a loop ({', '.join(map(repr, self._stores))}) have no room left for a state of it, which "
            "they had when it began: something else uses them, or states grow. Give the loop stores of its own, with a "
            "limit that holds, or slots="
        )
