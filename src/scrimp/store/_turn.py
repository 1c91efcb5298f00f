"""Taking turns, where destructors take part."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class Turn:
    """A lock for bookkeeping that destructors add to.

    The garbage collector may call a destructor in the middle of the bookkeeping, in the same thread. So destructors
    only leave a note and call :meth:`soon`; whoever has the turn looks at the notes before giving it up.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = weakref.WeakMethod(settle)  # no cycle: what takes turns goes with its last reference
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        try:
            settle = self._settle()
            if self._depth == 1 and settle is not None:
                settle()
        finally:
            self._depth -= 1
            self._lock.release()

    def soon(self) -> None:
        """Look at the notes now, or leave it to whoever has the turn."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:
                    with self:
                        pass
            finally:
                self._lock.release()
