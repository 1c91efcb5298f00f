"""Host memory, and files for what it cannot hold."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import final

from torch import Tensor

from scrimp.store._account import StoreStatistics
from scrimp.store._disk import Disk, DiskCopy
from scrimp.store._host import Host, HostCopy
from scrimp.store._lanes import Landing
from scrimp.store._store import Copy, Store


@final
class Tiers(Store):
    """Keeps bytes in host memory, and moves what has been there longest to disk when that is full.

    Backward asks first for what was stored last, so that stays near.

    Args:
        near: Host memory, with a limit.
        far: A disk.

    >>> import tempfile, torch, scrimp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tiers = scrimp.store.Tiers(scrimp.store.Host("32KiB"), scrimp.store.Disk(folder))
    ...     x = torch.randn(64, 64, requires_grad=True)
    ...     with scrimp.session(policy=scrimp.policy.StoreAll(tiers)):
    ...         loss = x.exp().tanh().sigmoid().sqrt().sum()
    ...     loss.backward()
    >>> tiers.near.statistics.held.peak_bytes, tiers.far.statistics.held.total
    (32768, 3)
    """

    def __init__(self, near: Host, far: Disk) -> None:
        super().__init__(None, near.window)
        self.near = near
        self.far = far
        self._at_host: deque[_TieredCopy] = deque()
        self._moving: deque[DiskCopy] = deque()

    def __repr__(self) -> str:
        return f"Tiers({self.near!r}, {self.far!r})"

    @property
    def statistics(self) -> StoreStatistics:
        """What both did together. Those of ``near`` and ``far`` also count what moved from one to the other."""
        near, far = self.near.statistics, self.far.statistics
        return dataclasses.replace(
            super().statistics,
            seconds_out=near.seconds_out + far.seconds_out,
            seconds_in=near.seconds_in + far.seconds_in,
            waited_seconds=near.waited_seconds + far.waited_seconds,
        )

    def stay_ahead_no_longer(self) -> None:
        """Let go of what was fetched ahead, in both."""
        super().stay_ahead_no_longer()
        self.near.stay_ahead_no_longer()
        self.far.stay_ahead_no_longer()

    def _take(self, content: Tensor) -> Copy | None:
        inner = self.near.put(content, scheduled=True)
        while inner is None and self._make_room():
            inner = self.near.put(content, scheduled=True)
        if inner is None:
            inner = self.far.put(content, scheduled=True)
        if inner is None:
            return None
        copy = _TieredCopy(self, inner)
        if isinstance(inner, HostCopy):
            self._at_host.append(copy)
            self._move_in_time()
        return copy

    def _move_in_time(self) -> None:
        """Have some room in host memory before it is needed, so that nobody has to wait for the disk."""
        limit = self.near.limit
        if limit is None:
            return
        spare = min(self.window, limit // 4)
        while self._moving and self._moving[0].is_written:
            self._moving.popleft().see_to_write()
        while self.near._account.held.bytes + spare > limit and self._move_oldest():
            pass

    def _make_room(self) -> bool:
        if self._moving:
            self._moving.popleft().see_to_write()
            return True
        return self._move_oldest()

    def _move_oldest(self) -> bool:
        """Begin to move something to disk; False where nothing can be moved."""
        for _ in range(len(self._at_host)):
            copy = self._at_host.popleft()
            inner = copy.inner
            if not isinstance(inner, HostCopy) or copy.is_forgotten:
                continue
            if copy.on_device or inner.landing is not None:
                self._at_host.append(copy)  # on its way
                continue
            moved = self.far.take_over(inner)
            if moved is None:
                self._at_host.appendleft(copy)
                return False
            inner.discard()
            copy.inner = moved
            self._moving.append(moved)
            return True
        return False


@final
class _TieredCopy(Copy):
    __slots__ = ("inner", "is_forgotten")

    def __init__(self, tiers: Tiers, inner: Copy) -> None:
        super().__init__(tiers, inner.nbytes, inner.taken, inner.device)
        self.at_once = inner.at_once
        self.inner = inner
        self.is_forgotten = False

    def wait_until_left(self, content: Tensor, owner: int) -> None:
        self.inner.wait_until_left(content, owner)

    def arrive(self) -> None:
        self.inner.arrive()

    def come(self) -> Landing:
        return self.inner.store._hand_over(self.inner)

    def approach(self) -> None:
        with self.inner.store._turn:
            self.inner.approach()

    def set_out(self) -> None:
        with self.inner.store._turn:
            self.inner.set_out()

    def forget(self) -> None:
        self.is_forgotten = True
        self.inner.discard()
