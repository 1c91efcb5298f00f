"""What can watch a backward pass, or stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.autograd.graph import Node

from scrimp._engine.interrupted import undone
from scrimp._engine.own_pass import OwnPass
from scrimp.errors import BackwardCancelledError

Gradients = Sequence[Tensor | None]


class Observer:
    """Is told of every node of the graph before and after it runs; does nothing by itself.

    On several devices PyTorch runs nodes in one thread per device: ``before`` and ``after`` may then be
    called from these threads. An exception raised in ``before`` or ``after`` stops the pass. Nodes of graphs
    that a checkpoint makes during backward are part of the node that makes them.
    """

    def begin(self, total: int) -> None:
        """The pass starts; at most ``total`` nodes will run."""

    def before(self, node: Node) -> None:
        """``node`` is about to run."""

    def after(self, node: Node, made: Gradients, received: Gradients) -> None:
        """``node`` has run: it received gradients and made others."""

    def end(self) -> None:
        """The pass is over, whether it succeeded or not."""


@final
class ProgressBar(Observer):
    """Shows a bar in the terminal while a long backward pass runs.

    Example:
        >>> import torch, scrimp
        >>> x = torch.ones(3, requires_grad=True)
        >>> scrimp.backward(x.exp().sum(), observer=scrimp.ProgressBar())  # doctest: +SKIP
    """

    _REFRESH_SECONDS = 0.05

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def begin(self, total: int) -> None:
        """Show an empty bar."""
        columns = (TextColumn("backward"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, auto_refresh=False)
        self._task = self._bar.add_task("backward", total=total)
        self._done, self._shown = 0, time.perf_counter()
        self._bar.start()

    def after(self, node: Node, made: Gradients, received: Gradients) -> None:
        """Count the node; redraw now and then."""
        assert self._bar is not None
        with self._lock:
            self._done += 1
            now = time.perf_counter()
            if now - self._shown >= self._REFRESH_SECONDS:
                self._shown = now
                self._bar.update(self._task, completed=self._done, refresh=True)

    def end(self) -> None:
        """Draw the final count and leave the terminal as it was."""
        assert self._bar is not None
        self._bar.update(self._task, completed=self._done)
        self._bar.stop()
        self._bar = None


@final
class Cancellation(Observer):
    """Stops a backward pass between two nodes when :meth:`cancel` was called, from any thread or hook.

    The pass then raises ``BackwardCancelledError``. Every leaf has either its whole gradient of this pass in
    ``.grad`` (the error's ``leaves_done``) or is untouched. The nodes that ran are freed unless
    ``retain_graph=True`` was given; with it the same pass can be run again.

    Example:
        >>> import torch, scrimp
        >>> cancellation = scrimp.Cancellation()
        >>> cancellation.cancel()
        >>> x = torch.ones(3, requires_grad=True)
        >>> try:
        ...     scrimp.backward(x.sum(), observer=cancellation)
        ... except scrimp.errors.BackwardCancelledError as error:
        ...     print(error.nodes_done, x.grad)
        0 None
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop before the next node."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._event.is_set()

    def before(self, node: Node) -> None:
        """Raise when cancelled."""
        if self._event.is_set():
            raise BackwardCancelledError("backward was cancelled")


@final
class Watch:
    """Puts the observers' hooks on every node while it is open, and counts what has run."""

    def __init__(self, nodes: Sequence[Node], observers: Sequence[Observer]) -> None:
        self._nodes = nodes
        self._observers = observers
        self._begun: list[Observer] = []
        self.nodes_done = 0
        self.leaves_done: list[Tensor] = []
        self.running: Node | None = None
        self._pass = OwnPass()

    def __enter__(self) -> Watch:
        self._handles = []
        try:
            for observer in self._observers:
                observer.begin(len(self._nodes))
                self._begun.append(observer)
            for node in self._nodes:
                self._handles.append(node.register_prehook(lambda _, node=node: self._before(node)))
                self._handles.append(
                    node.register_hook(lambda made, received, node=node: self._after(node, made, received))
                )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            undone(self._unhook)
        finally:
            while self._begun:
                self._begun.pop(0).end()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, node: Node) -> None:
        if not self._pass.runs(node):
            return
        self.running = node
        for observer in self._observers:
            observer.before(node)

    def _after(self, node: Node, made: Gradients, received: Gradients) -> None:
        if not self._pass.runs(node):
            return
        self.nodes_done += 1
        leaf = getattr(node, "variable", None)
        if leaf is not None and received[0] is not None:
            self.leaves_done.append(leaf)
        for observer in self._observers:
            observer.after(node, made, received)
        self.running = None
