"""Ctrl-C where it would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def undone(undo: Callable[[], None]) -> None:
    """Call ``undo``, from its beginning again whenever Ctrl-C came in its midst; the interrupt surfaces at the end.

    What ``undo`` does must be the same done twice.
    """
    try:
        undo()
    except KeyboardInterrupt:
        undone(undo)
        raise


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: for code of others that must not be interrupted, and is short."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(signal.SIGINT, came.pop())
