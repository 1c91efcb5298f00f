"""Files of bytes, written and read whole, with a checksum that is kept in memory."""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scrimp.errors import StoreError
from scrimp.store._memory import Memory

_STRIDE = 16 << 20


class Written(NamedTuple):
    """What is known of a file that was written."""

    checksum: int
    seconds: float


def write(path: Path, memory: Memory, nbytes: int) -> Written:
    """Write bytes to a new file, readable by its owner alone; what cannot be written whole is removed.

    Raises:
        StoreError: when the disk is full, say.
    """
    start = time.perf_counter()
    checksum = 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for part in _parts(memory, nbytes):
                checksum = zlib.crc32(part, checksum)
                rest = part
                while rest:
                    rest = rest[write_some(descriptor, rest) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreError(f"need to write {nbytes} bytes to {path}, cannot: {error.strerror or error}") from error
    return Written(checksum, time.perf_counter() - start)


def read(path: Path, memory: Memory, nbytes: int, checksum: int) -> float:
    """Read a file that was written; return how many seconds that took.

    Raises:
        StoreError: when it is not there any more, or does not hold what was written to it.
    """
    start = time.perf_counter()
    found = 0
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise StoreError(f"need the {nbytes} bytes that were written to {path}, have {size} there now")
            for part in _parts(memory, nbytes):
                rest = part
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise StoreError(f"need the {nbytes} bytes that were written to {path}; it ends before")
                    rest = rest[count:]
                found = zlib.crc32(part, found)
    except OSError as error:
        raise StoreError(f"need to read {path}, cannot: {error.strerror or error}") from error
    if found != checksum:
        raise StoreError(f"need the bytes that were written to {path}, have others: it was altered")
    return time.perf_counter() - start


def write_some(descriptor: int, content: memoryview) -> int:
    """Write as many bytes as the system takes at once."""
    return os.write(descriptor, content)


def _parts(memory: Memory, nbytes: int) -> Iterator[memoryview]:
    for piece in memory.pieces:
        # Not through NumPy: a storage that has given its memory to an array counts as changed at any time.
        whole = (ctypes.c_ubyte * piece.numel()).from_address(piece.data_ptr()) if piece.numel() else b""
        content = memoryview(whole).cast("B")[: min(nbytes, piece.numel())]
        nbytes -= len(content)
        for start in range(0, len(content), _STRIDE):
            yield content[start : start + _STRIDE]
