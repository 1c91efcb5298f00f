"""Which pass a hook is called from: nodes may be run by several at the same time."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import final

import torch
from torch.autograd import graph
from torch.autograd.graph import Node

# Every pass that Python code asks for is below a frame of this function.
_ASKS_FOR_A_PASS = graph._engine_run_backward.__code__


@final
class OwnPass:
    """Tells the pass that this thread is about to run from others over the same nodes.

    Leaves are shared by all graphs of a model, and a retained graph may be run by several threads, or again by a hook
    while it is being run: hooks of ours are then called from passes that are not ours. PyTorch runs the CPU's nodes in
    the thread that asked for the pass, and those of other devices in a thread for each device, where the first pass
    seen that is inside of no other is taken for this one.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = _passes_under_way() + 1
        self._task: int | None = None

    def runs(self, node: Node) -> bool:
        """Whether it is this pass that runs ``node`` now, and neither another thread's nor one nested in this."""
        task = torch._C._current_graph_task_id()
        if self._task is None and not self.is_elsewhere(node) and _passes_under_way() == self._depth_here():
            self._task = task
        return task == self._task

    def is_elsewhere(self, node: Node) -> bool:
        """Whether ``node`` is run now for another thread than ours."""
        return threading.get_ident() != self._thread and all(m.device.type == "cpu" for m in node._input_metadata)

    def _depth_here(self) -> int:
        return self._depth if threading.get_ident() == self._thread else 0


def _passes_under_way() -> int:
    """How many passes this thread has asked for that have not ended, each from a node of the one before."""
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        count += frame.f_code is _ASKS_FOR_A_PASS
        frame = frame.f_back
    return count
