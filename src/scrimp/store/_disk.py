"""Files in a folder."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from scrimp._budget import format_bytes
from scrimp.errors import StoreError, StoreWarning
from scrimp.store import _files
from scrimp.store._account import Span
from scrimp.store._files import Written
from scrimp.store._folder import Folder
from scrimp.store._host import HostCopy
from scrimp.store._lanes import Landing, Lanes, unseen
from scrimp.store._memory import Memory, Pool, plain
from scrimp.store._store import Copy, Store


class _Job(NamedTuple):
    """Something that a thread does with host memory, which is not to be used for anything else before."""

    future: Future[Any]
    memory: Memory


@final
class Disk(Store):
    """Keeps bytes in files, for what the memory of the host cannot hold.

    Files hold the bytes and nothing else, and are readable by their owner alone. One thread writes them while the step
    goes on and another reads them ahead of time; each is compared with its checksum. They lie in a folder of their own
    inside ``path``, so any number of processes can use the same path. It is removed when the store is collected, when
    the interpreter exits, and, after a crash, by the next process that makes a ``Disk`` there.

    When a file was removed, truncated or altered, its value is recomputed if it can be, with a
    :class:`scrimp.errors.StoreWarning`; if not, :class:`scrimp.errors.StoreError` names the file. When the disk is
    full, nothing is lost: what could not be written stays in memory, and until there is room again no more is taken.

    Args:
        path: A folder, made if it is not there.
        limit: Bytes of files at most; None: as much as there is room for.
        window: Bytes that may be on their way, in each direction: of the device's memory, and of the host's.

    Raises:
        StoreError: when the folder cannot be written to.

    >>> import tempfile, torch, scrimp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     disk = scrimp.store.Disk(folder, "1GiB")
    ...     x = torch.randn(64, 64, requires_grad=True)
    ...     with scrimp.session(policy=scrimp.policy.StoreAll(disk)):
    ...         loss = x.exp().sum()
    ...     loss.backward()
    >>> disk.statistics.bytes_in
    16384
    """

    def __init__(
        self, path: str | os.PathLike[str], limit: int | str | None = None, *, window: int | str = "256MiB"
    ) -> None:
        super().__init__(limit, window)
        self._folder = Folder(path)
        self._process = os.getpid()
        self._lanes = Lanes()
        self._staging = Pool(None)
        self._writer = ThreadPoolExecutor(1, "scrimp writes")
        self._reader = ThreadPoolExecutor(1, "scrimp reads")
        self._writing: deque[DiskCopy] = deque()
        self._jobs: list[_Job] = []
        self._refuses: StoreError | None = None

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f", {format_bytes(self.limit)}"
        return f"Disk({str(self._folder.path.parent)!r}{limit})"

    def _take(self, content: Tensor) -> Copy | None:
        nbytes = content.numel()
        if not self._has_room(nbytes):
            return None
        span: Span = 0.0
        memory = Memory((content,))
        if content.device.type != "cpu":
            memory = self._memory_for(nbytes, content.device)
            span = self._lanes.leave(content, memory)
        return self._copy(memory, nbytes, content.device, span)

    def take_over(self, copy: HostCopy) -> DiskCopy | None:
        """Write what another store has, and give its memory back then; None where there is no room."""
        with self._turn:
            if not self._has_room(copy.nbytes):
                return None
            mine = self._copy(*self._surrendered(copy))
            self._add(mine, scheduled=True)
            return mine

    @staticmethod
    def _surrendered(copy: HostCopy) -> tuple[Memory, int, torch.device, Span]:
        memory, span = copy.surrender()
        return memory, copy.nbytes, copy.device, span

    def _copy(self, memory: Memory, nbytes: int, device: torch.device, left: Span) -> DiskCopy:
        copy = DiskCopy(self, memory, nbytes, device, left)
        self._writing.append(copy)
        return copy

    def _has_room(self, nbytes: int) -> bool:
        if os.getpid() != self._process:
            raise StoreError(f"{self} belongs to the process that made it; make another in this one")
        self._look_after_writes(nbytes)
        within = self.limit is None or self._account.held.bytes + nbytes <= self.limit
        return within and self._refuses is None

    def _memory_for(self, nbytes: int, device: torch.device) -> Memory:
        if device.type == "cpu":
            return plain(nbytes)  # seen by all: it is the memory of the step that bytes come back to
        with unseen():
            memory = self._staging.take(nbytes) if device.type == "cuda" else None
            return plain(nbytes) if memory is None else memory

    def _look_after_writes(self, coming: int) -> None:
        """See what became of what is being written; wait for as much of it as it takes to stay in the window."""
        on_the_way = coming + sum(copy.nbytes for copy in self._writing)
        while self._writing and (self._writing[0].is_written or on_the_way > self.window):
            copy = self._writing.popleft()
            on_the_way -= copy.nbytes
            copy.see_to_write()
        for job in self._jobs:
            if job.future.done():
                job.memory.release()
        self._jobs = [job for job in self._jobs if not job.future.done()]


@final
class DiskCopy(Copy):
    """Bytes in a file, or on their way there."""

    __slots__ = ("_disk", "_left", "_memory", "_path", "_read", "_seen", "_write")

    def __init__(self, disk: Disk, memory: Memory, nbytes: int, device: torch.device, left: Span) -> None:
        super().__init__(disk, nbytes, nbytes, device)
        self._disk = disk
        self._left = left
        self._path = disk._folder.new_file()
        self._memory: Memory | None = memory
        """What is being written, was written a moment ago, or could not be."""
        self._seen = False
        self._read: _Job | None = None
        self._write: Future[Written] = disk._writer.submit(_write_after, left, self._path, memory, nbytes)

    @property
    def is_written(self) -> bool:
        """Whether the thread is done with it."""
        return self._write.done()

    def see_to_write(self) -> None:
        """Wait until it is written, and give back the memory; if it could not be, that is all there is of it."""
        if self._seen or self._write.cancelled():
            return
        start = time.perf_counter()
        error = self._write.exception()
        self._disk._account.waited.add(time.perf_counter() - start)
        self._seen = True
        if error is None:
            assert self._memory is not None
            self._disk._account.out.add(self._write.result().seconds)
            self._memory.release()
            self._memory = None
        elif not isinstance(error, StoreError):
            raise error
        elif self._disk._refuses is None:
            self._disk._refuses = error
            warnings.warn(StoreWarning(f"{error}. Until there is room, nothing more is stored there"), stacklevel=2)

    def wait_until_left(self, content: Tensor, owner: int) -> None:
        with self._disk._turn:
            if self.device.type == "cuda":
                self._disk._account.waited.add(self._disk._lanes.left(self._left, content, owner))
                return
            self.see_to_write()
            if self._memory is not None and self.device.type == "cpu":
                with unseen():  # what it has is the memory that is to be freed
                    self._memory = Memory([piece.clone() for piece in self._memory.pieces])

    def approach(self) -> None:
        if self._read is None:
            self._begin_to_read()
        elif self.device.type == "cuda" and self._read.future.done() and not self._read.future.exception():
            self._disk._landing_of(self)

    def _begin_to_read(self) -> None:
        if self._read is None and self._memory is None:
            memory = self._disk._memory_for(self.nbytes, self.device)
            checksum = self._write.result().checksum
            self._read = _Job(self._disk._reader.submit(_read_after, self._path, memory, self.nbytes, checksum), memory)

    def arrive(self) -> None:
        with self._disk._turn:
            self.see_to_write()

    def set_out(self) -> None:
        self.approach()  # to wait for the disk would hold up the host

    def come(self) -> Landing:
        if self._memory is not None:
            return self._disk._lanes.land(self._memory, self.nbytes, self.device)
        self._begin_to_read()
        assert self._read is not None
        job, self._read = self._read, None
        start = time.perf_counter()
        try:
            self._disk._account.back.add(job.future.result())
        finally:
            self._disk._account.waited.add(time.perf_counter() - start)
        if self.device.type == "cpu":
            return Landing(job.memory.pieces[0], 0.0, None, None)
        landing = self._disk._lanes.land(job.memory, self.nbytes, self.device)
        job.memory.release()
        return landing

    def forget(self) -> None:
        disk = self._disk
        if self in disk._writing:
            disk._writing.remove(self)
        if self._read is not None:
            disk._jobs.append(self._read)
        if self._memory is not None:
            disk._jobs.append(_Job(self._write, self._memory))
        if self._write.cancel():
            return
        if not self._write.done():
            with contextlib.suppress(RuntimeError):  # the interpreter is about to exit, and removes the whole folder
                disk._writer.submit(self._path.unlink, missing_ok=True)
        elif not self._write.exception():
            self._path.unlink(missing_ok=True)
            disk._refuses = None
        if not disk._account.held.count:
            disk._refuses = None


def _write_after(left: Span, path: Path, memory: Memory, nbytes: int) -> Written:
    if not isinstance(left, float):
        left[1].synchronize()
    return _files.write(path, memory, nbytes)


def _read_after(path: Path, memory: Memory, nbytes: int, checksum: int) -> float:
    for event in memory.free_after:
        event.synchronize()
    return _files.read(path, memory, nbytes, checksum)
