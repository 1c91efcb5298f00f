"""A folder of our own inside one that processes share, and what is left of those that crashed."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
import weakref
from pathlib import Path
from typing import final

from scrimp.errors import StoreError

if sys.platform != "win32":
    import fcntl

_PREFIX = "scrimp-"


@final
class Folder:
    """A private folder, removed with everything in it when it is collected or the interpreter exits.

    Next to it lies a file that is locked as long as this process lives; the system unlocks it even after a crash. So
    whoever makes a folder in the same place knows which of the others nobody will come back to, and removes them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if sys.platform == "win32":
            raise StoreError("scrimp.store.Disk needs a system with POSIX file locks; use scrimp.store.Host here")
        try:
            shared = Path(path)
            shared.mkdir(parents=True, exist_ok=True)
            remove_abandoned(shared)
            lock, self._descriptor = _locked(shared)
            self.path = lock.with_suffix("")
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise StoreError(f"need a folder to write to, have {os.fspath(path)}: {error.strerror or error}") from error
        self._files = 0
        self.close = weakref.finalize(self, _remove, self.path, lock, self._descriptor, os.getpid())
        """Remove the folder now."""

    def new_file(self) -> Path:
        """Return the name of a file that does not exist yet."""
        self._files += 1
        return self.path / f"{self._files}.bytes"


def remove_abandoned(shared: Path) -> None:
    """Remove the folders of processes that are no more."""
    for lock in shared.glob(f"{_PREFIX}*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # gone by now, or another user's
        try:
            if _lock(descriptor):
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _locked(shared: Path) -> tuple[Path, int]:
    """Make a lock file; what another process takes for abandoned before it is locked is left to that process."""
    while True:
        lock = shared / f"{_PREFIX}{uuid.uuid4().hex}.lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if _lock(descriptor) and lock.exists():
            return lock, descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, lock: Path, descriptor: int, process: int) -> None:
    if os.getpid() != process:
        return  # a fork of the process whose folder it is
    shutil.rmtree(path, ignore_errors=True)
    lock.unlink(missing_ok=True)
    os.close(descriptor)
