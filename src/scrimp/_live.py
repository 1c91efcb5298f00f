"""Bytes of storages that are alive, counted by weak references: exact on any device, and free of the allocator."""

from __future__ import annotations

import functools
import weakref
from typing import final

import torch


@final
class LiveStorages:
    """Storages that were added and have not died since.

    Args:
        block: the allocator's unit: sizes are rounded up to a multiple of it.
    """

    def __init__(self, block: int = 1) -> None:
        self.now = 0
        self.peak = 0
        self._block = block
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._sizes

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now until it dies; one that is counted already is counted at its present size."""
        address = storage._cdata
        if address not in self._sizes:
            self._sizes[address] = 0
            self._watches[address] = weakref.ref(storage, lambda _: self._forget(address))
        size = rounded(storage.nbytes(), self._block)
        self.now += size - self._sizes[address]
        self._sizes[address] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, address: int) -> None:
        del self._watches[address]
        self.now -= self._sizes.pop(address)


def rounded(nbytes: int, block: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks.

    >>> rounded(513, 512), rounded(7, 1)
    (1024, 7)
    """
    return -(-nbytes // block) * block


def users(address: int) -> int:
    """Return how many tensors look at a storage that is alive and watched by a weak reference."""
    return int(torch._C._storage_Use_Count(address)) - _counted_without_users()


@functools.cache
def _counted_without_users() -> int:
    # A storage that Python has met is counted once more, or not, depending on PyTorch's version.
    with torch._C._DisableTorchDispatch():
        tensor = torch.zeros(1)
    storage = tensor.untyped_storage()
    address, watch = storage._cdata, weakref.ref(storage)
    del storage
    count = int(torch._C._storage_Use_Count(address)) - 1
    assert watch() is not None
    return count
