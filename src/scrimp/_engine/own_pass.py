"""Which pass a hook is called from: nodes may be run by several at the same time."""

from __future__ import annotations

import threading
from typing import final

import torch
from torch.autograd.graph import Node


@final
class OwnPass:
    """Tells the pass that this thread is about to run from others over the same nodes.

    Leaves are shared by all graphs of a model, and a retained graph may be run by several threads: hooks of ours are
    then called from passes that are not ours. PyTorch runs the CPU's nodes in the thread that asked for the pass, and
    those of other devices in a thread for each device, where the first pass seen is taken for this one.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._task: int | None = None

    def runs(self, node: Node) -> bool:
        """Whether it is this pass that runs ``node`` now, and neither another thread's nor one nested in this."""
        task = torch._C._current_graph_task_id()
        if self._task is None and not self.is_elsewhere(node):
            self._task = task
        return task == self._task

    def is_elsewhere(self, node: Node) -> bool:
        """Whether ``node`` is run now for another thread than ours."""
        return threading.get_ident() != self._thread and all(m.device.type == "cpu" for m in node._input_metadata)
