"""Counting the bytes of storages that are alive, deterministically, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scrimp._compiler import never_compiled
from scrimp._live import LiveStorages
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
        self._live = LiveStorages()

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return self._live.now

    @property
    def peak(self) -> int:
        """The most bytes that ever were."""
        return self._live.peak

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below in one that imports the compiler when it is first called, and what is
        # alive then stays so until the garbage collector runs. `never_compiled` does what that is for.
        return False

    @never_compiled
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
            if storage._cdata in self._live:
                self._live.add(storage)  # it may have been resized
        for storage in _storages(result):
            if storage._cdata not in older:
                self._live.add(storage)
        return result


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
