"""Ctrl-C and a loop: it gets through while a function of the user's runs, and waits while the loop's own code does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar, final

P = ParamSpec("P")
R = TypeVar("R")


@final
class Patience:
    """A context in which an interrupt stops nothing half way, such as a state on its way into a store.

    It is for the main thread, the only one that is interrupted; elsewhere it does nothing.
    """

    __slots__ = ("_before", "_users", "_waiting")

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._users = False
        self._waiting: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Patience:
        """Have interrupts wait."""
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._arrive)
        return self

    def __exit__(self, *_: object) -> None:
        """Deliver the one that waits."""
        if self._before is None:
            return
        if signal.getsignal(signal.SIGINT) == self._arrive:
            signal.signal(signal.SIGINT, self._before)
        self._deliver()

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function of the user's, which may be interrupted."""
        self._deliver()
        self._users = True
        try:
            return function(*args, **kwargs)
        finally:
            self._users = False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._waiting = number, frame
        if self._users:
            self._deliver()

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._before is not None:
            self._before(*waiting)
