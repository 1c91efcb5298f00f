"""What every node of a pass takes, and whether Python code takes part in it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any, final

from torch.autograd.graph import Node

from scrimp._engine.observe import Gradients, Observer


@final
class Clock(Observer):
    """Times every node, and notices when Python code runs in the pass.

    Hooks, custom Functions and checkpoints may ask about the pass as a whole, or want to be called one after the
    other: such a pass stays in one piece. What a collection of garbage calls has nothing to do with the pass, and its
    time is not the node's.
    """

    _OURS = frozenset({"scrimp._engine.observe", "scrimp._engine.own_pass", "scrimp._engine.threaded", __name__})

    def __init__(self) -> None:
        self.seconds: dict[Node, float] = {}
        self.saw_python = False
        self.saw_nothing = False
        self._thread = threading.get_ident()
        self._running = False
        self._start = 0.0
        self._collecting: float | None = None

    def begin(self, total: int) -> None:
        """Look out for Python code, in this thread: that is where the CPU's nodes run."""
        gc.callbacks.insert(0, self._collection_begins)  # before and after what others call at a collection
        gc.callbacks.append(self._collection_ends)
        sys.setprofile(self._look)

    def before(self, node: Node) -> None:
        """Start the node's clock."""
        self._running = True
        self._start = time.perf_counter()

    def after(self, node: Node, made: Gradients, received: Gradients) -> None:
        """Stop the node's clock."""
        self.seconds[node] = time.perf_counter() - self._start
        if any(gradient is None for gradient, edge in zip(made, node.next_functions, strict=False) if edge[0]):
            self.saw_nothing = True

    def end(self) -> None:
        """Look no longer."""
        sys.setprofile(None)
        gc.callbacks.remove(self._collection_begins)
        gc.callbacks.remove(self._collection_ends)

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and getattr(arg, "__name__", "") == "run_backward":
            self._running = False
        elif event == "call" and self._running and self._collecting is None:
            self.saw_python |= frame.f_globals.get("__name__") not in self._OURS

    def _collection_begins(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == self._thread:
            self._collecting = time.perf_counter()

    def _collection_ends(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and self._collecting is not None and threading.get_ident() == self._thread:
            self._start += time.perf_counter() - self._collecting
            self._collecting = None
