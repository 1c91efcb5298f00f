"""Host memory that copies go to: pinned and used again where there is a CUDA device, plain otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scrimp._pieces import pieces_for


class Memory:
    """Some host memory, in pieces."""

    __slots__ = ("busy", "free_after", "home", "pieces")

    def __init__(
        self, pieces: Sequence[Tensor], free_after: Sequence[torch.cuda.Event] = (), home: Pool | None = None
    ) -> None:
        self.pieces = pieces
        self.home = home
        self.free_after = free_after
        """Copies from and to it that were begun for others; the first copy of ours waits for them."""
        self.busy: torch.cuda.Event | None = None
        """The end of the last copy of ours."""

    @property
    def capacity(self) -> int:
        """Bytes that it takes."""
        return sum(piece.numel() for piece in self.pieces)

    def release(self) -> None:
        """Give it back: nobody reads or writes it any more but copies that were begun."""
        if self.home is not None:
            self.home.give_back(self)
        self.pieces = ()

    def fill(self, content: Tensor) -> None:
        """Copy ``content``, which is bytes, into it."""
        for piece, part in self._parts(content):
            piece.copy_(part, non_blocking=True)

    def pour(self, tensor: Tensor) -> None:
        """Copy what is in it into ``tensor``, which is bytes."""
        for piece, part in self._parts(tensor):
            part.copy_(piece, non_blocking=True)

    def _parts(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        start = 0
        for piece in self.pieces:
            size = min(piece.numel(), tensor.numel() - start)
            pairs.append((piece[:size], tensor[start : start + size]))
            start += size
        return pairs


def plain(nbytes: int) -> Memory:
    """Return memory as any other."""
    return Memory((torch.empty(nbytes, dtype=torch.uint8),))


def pinned(nbytes: int) -> Tensor:
    """Return pinned memory, or pageable where the system has no more of it: copies then hold up the host."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8)


class Pool:
    """Pinned pieces, given out again and again. Pieces that lie idle go when the limit is needed for other sizes."""

    def __init__(self, limit: int | None, allocate: Callable[[int], Tensor] = pinned) -> None:
        self._limit = limit
        self._allocate = allocate
        self._idle: dict[int, list[tuple[Tensor, torch.cuda.Event | None]]] = {}
        self._allocated = 0

    @property
    def allocated(self) -> int:
        """Bytes that the pool has, idle ones included."""
        return self._allocated

    def take(self, nbytes: int) -> Memory | None:
        """Return memory for so many bytes; None where that would be above the limit."""
        wanted = pieces_for(nbytes)
        missing = sum(wanted) - self._idle_for(wanted)
        if self._limit is not None and self._allocated + missing > self._limit:
            self._shrink(self._allocated + missing - self._limit, keep=wanted)
            if self._allocated + missing > self._limit:
                return None
        pieces = [self._piece(size) for size in wanted]
        return Memory([piece for piece, _ in pieces], [busy for _, busy in pieces if busy is not None], self)

    def give_back(self, memory: Memory) -> None:
        """Take memory back; it is given out again at once, to be used after its event."""
        for piece in memory.pieces:
            self._idle.setdefault(piece.numel(), []).append((piece, memory.busy))

    def _idle_for(self, wanted: list[int]) -> int:
        return sum(size * min(wanted.count(size), len(self._idle.get(size, ()))) for size in set(wanted))

    def _piece(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        idle = self._idle.get(size)
        if idle:
            return idle.pop()
        self._allocated += size
        return self._allocate(size), None

    def _shrink(self, nbytes: int, keep: list[int]) -> None:
        for size, idle in sorted(self._idle.items(), reverse=True):
            spare = len(idle) - keep.count(size)
            while nbytes > 0 and spare > 0:
                idle.pop(0)
                spare -= 1
                nbytes -= size
                self._allocated -= size
