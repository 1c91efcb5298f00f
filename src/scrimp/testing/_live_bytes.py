"""Counting the bytes of storages that are alive, deterministically, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scrimp.testing._bits import dense_parts


@final
class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages made inside the block that are alive `now`, and the most there ever were.

    Each storage counts once, however many tensors view it, from the operator that returns it until its
    last reference dies; when it is resized its new size counts. What is older than the block counts nothing:
    parameters and inputs stay out. So does what lives and dies inside one operator (a convolution's
    workspace). Only operators of the thread that entered the block are seen; a CPU backward runs there too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        inputs = list(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        # A literal (`torch.tensor(3.0)`) is made before the dispatcher first sees it, as an input of this.
        older = set() if func is torch.ops.aten.lift_fresh.default else {s._cdata for s in inputs}
        for storage in inputs:
            if storage._cdata in self._sizes:
                self._resize(storage)
        for storage in _storages(result):
            if storage._cdata not in self._sizes and storage._cdata not in older:
                self._watch(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._sizes[key] = 0
        self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resize(storage)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        del self._watches[key]
        self.now -= self._sizes.pop(key)


def live_bytes() -> LiveBytes:
    """Count live and peak bytes of the storages that a block of code makes.

    Returns:
        A context manager; `.now` and `.peak` are right at every moment, inside the block and after it.

    Example:
        >>> with live_bytes() as count:
        ...     a = torch.ones(1000)
        ...     b = a.view(10, 100)
        ...     c = a + 1
        ...     del a
        >>> count.now, count.peak
        (8000, 8000)
        >>> del b, c
        >>> count.now, count.peak
        (0, 8000)
    """
    return LiveBytes()


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from _storages_of(leaf)


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return
    for name, part in dense_parts(tensor).items():
        if name:
            yield from _storages_of(part)
        else:
            yield part.untyped_storage()
