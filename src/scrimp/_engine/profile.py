"""What every node of a backward pass took and made."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.filesize import decimal
from rich.table import Table
from torch import Tensor
from torch.autograd.graph import Node

from scrimp._engine.chrome_trace import ChromeEvent, ChromeTrace, write_json
from scrimp._engine.observe import Gradients, Observer


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One node's run: its start and length in seconds, and the bytes of the gradients that it made."""

    name: str
    start: float
    seconds: float
    bytes: int
    thread: int


@dataclass(frozen=True, slots=True)
class NodeTotal:
    """All runs of the nodes of one name."""

    name: str
    count: int
    seconds: float
    bytes: int


@final
class Profile(Observer):
    """Records the time and the gradient bytes of every node.

    Times are the host's: on an accelerator they say how long a node took to launch, not to finish.

    Example:
        >>> import torch, scrimp
        >>> x = torch.ones(1000, requires_grad=True)
        >>> profile = scrimp.Profile()
        >>> scrimp.backward((x.sin() * x).sum(), observer=profile)
        >>> [(total.count, total.bytes) for total in profile.totals() if total.name == "SinBackward0"]
        [(1, 4000)]
    """

    def __init__(self) -> None:
        self.runs: list[NodeRun] = []
        self._started: dict[Node, float] = {}

    def before(self, node: Node) -> None:
        """Start the node's clock."""
        self._started[node] = time.perf_counter()

    def after(self, node: Node, made: Gradients, received: Gradients) -> None:
        """Stop the node's clock and count the storages that are new."""
        now = time.perf_counter()
        start = self._started.pop(node)
        self.runs.append(NodeRun(node.name(), start, now - start, _new_bytes(made, received), threading.get_ident()))

    def end(self) -> None:
        """Let go of nodes that started and never finished."""
        self._started.clear()

    def totals(self) -> list[NodeTotal]:
        """One line per name of node, the most expensive first."""
        by_name: dict[str, list[NodeRun]] = {}
        for run in self.runs:
            by_name.setdefault(run.name, []).append(run)
        totals = [
            NodeTotal(name, len(runs), sum(run.seconds for run in runs), sum(run.bytes for run in runs))
            for name, runs in by_name.items()
        ]
        return sorted(totals, key=lambda total: (-total.seconds, total.name))

    def chrome_trace(self) -> ChromeTrace:
        """The runs as data that chrome://tracing and Perfetto read."""
        events = [
            ChromeEvent(
                name=run.name,
                cat="backward",
                ph="X",
                ts=run.start * 1e6,
                dur=run.seconds * 1e6,
                pid=os.getpid(),
                tid=run.thread,
                args={"bytes": run.bytes},
            )
            for run in self.runs
        ]
        return ChromeTrace(traceEvents=events, displayTimeUnit="ms")

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`chrome_trace` as JSON; the file is either whole or not there."""
        write_json(self.chrome_trace(), Path(path))

    def __rich__(self) -> Table:
        table = Table("node", "count", "ms", "gradients made")
        for total in self.totals():
            table.add_row(total.name, str(total.count), f"{total.seconds * 1e3:.3f}", decimal(total.bytes))
        return table


def _new_bytes(made: Gradients, received: Gradients) -> int:
    """Bytes of the storages in ``made`` that are not in ``received``, each once."""
    had = {_storage_key(gradient) for gradient in received if gradient is not None}
    new = {_storage_key(gradient) for gradient in made if gradient is not None}
    return sum(size for _, size in new - had)


def _storage_key(gradient: Tensor) -> tuple[int, int]:
    try:
        storage = gradient.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage to ask
        return id(gradient), gradient.nbytes if not gradient.is_sparse else gradient._values().nbytes
