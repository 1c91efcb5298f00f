"""The memory of the host."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from scrimp._budget import format_bytes
from scrimp.store._account import Span
from scrimp.store._lanes import Landing, Lanes, unseen
from scrimp.store._memory import Memory, Pool, plain
from scrimp.store._store import Copy, Store


@final
class Host(Store):
    """Keeps bytes in the memory of the host.

    From a CUDA device they are copied beside the step, on a stream of their own in each direction, to pinned memory
    that is used again and again; where the system gives no more pinned memory it is pageable, and copies hold up the
    host. From the CPU they are copied there and then to other memory, which serves to try things out and gains nothing.

    Args:
        limit: Bytes of host memory that it takes at most; None: as much as it needs.
        window: Bytes of device memory that copies on their way may take, in each direction.

    >>> import torch, scrimp
    >>> host = scrimp.store.Host("1MiB")
    >>> x = torch.randn(256, 256, requires_grad=True)
    >>> with scrimp.session(policy=scrimp.policy.StoreOps({torch.ops.aten.exp}, host)):
    ...     x.sin().exp().sum().backward()
    >>> host.statistics.bytes_out
    262144
    """

    def __init__(self, limit: int | str | None = None, *, window: int | str = "256MiB") -> None:
        super().__init__(limit, window)
        self._lanes = Lanes()
        self._pool = Pool(self.limit)

    def __repr__(self) -> str:
        return f"Host({format_bytes(self.limit) if self.limit is not None else ''})"

    def _take(self, content: Tensor) -> Copy | None:
        nbytes = content.numel()
        with unseen():
            memory = self._pool.take(nbytes) if content.is_cuda else self._plain(nbytes)
        if memory is None:
            return None
        span = self._lanes.leave(content, memory)
        self._account.out.add(span)
        if isinstance(span, float):
            self._account.waited.add(span)
        return HostCopy(self, memory, nbytes, content.device, span)

    def _plain(self, nbytes: int) -> Memory | None:
        taken = self._account.held.bytes + self._pool.allocated
        return None if self.limit is not None and taken + nbytes > self.limit else plain(nbytes)


@final
class HostCopy(Copy):
    """Bytes in host memory."""

    __slots__ = ("_host", "_left", "_memory")

    def __init__(self, host: Host, memory: Memory, nbytes: int, device: torch.device, left: Span) -> None:
        super().__init__(host, nbytes, memory.capacity, device)
        self._host = host
        self._memory = memory
        self._left = left
        self.at_once = isinstance(left, float)

    def wait_until_left(self, content: Tensor, owner: int) -> None:
        with self._host._turn:
            self._host._account.waited.add(self._host._lanes.left(self._left, content, owner))

    def arrive(self) -> None:
        if not isinstance(self._left, float):
            self._left[1].synchronize()

    def come(self) -> Landing:
        landing = self._host._lanes.land(self._memory, self.nbytes, self.device)
        if isinstance(landing.span, float):
            self._host._account.waited.add(landing.span)
        return landing

    def approach(self) -> None:
        if self.device.type == "cuda":
            self._host._landing_of(self)

    def forget(self) -> None:
        self._memory.release()

    def surrender(self) -> tuple[Memory, Span]:
        """Give the memory, and when all will be in it, to another store. This copy has nothing any more."""
        memory, self._memory = self._memory, Memory(())
        return memory, self._left
