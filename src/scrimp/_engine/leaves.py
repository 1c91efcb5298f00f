"""Telling the user of each leaf as soon as its gradient is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from scrimp._engine.graph import Graph, describe
from scrimp.errors import LateGradientError

LeafCallback: TypeAlias = Callable[[Tensor, Tensor], object]

# Functions whose backward runs a forward and a backward of its own, with leaves that the graph does not show.
_NESTING = frozenset({"CheckpointFunctionBackward"})


class _Leaves:
    """Who has been reported, and who waits for a nesting node that might still add to its gradient."""

    def __init__(self, graph: Graph, callback: LeafCallback) -> None:
        self._callback = callback
        self._task: int | None = None
        self._nesting = {node for node in graph if node.name() in _NESTING}
        self._expected = {node for node, _ in graph.leaves}
        self._waiting: dict[Node, Tensor] = {}
        self._reported: set[Node] = set()
        self._watched: set[Node] = set()
        self._handles: list[RemovableHandle] = []
        for root in graph.roots:
            self._handles.append(root.register_prehook(self._note_task))
        for node, leaf in graph.leaves:
            self._watch(node, leaf)
        for node in self._nesting:
            self._handles.append(node.register_hook(lambda *_, node=node: self._nested_done(node)))

    @property
    def has_nesting(self) -> bool:
        return bool(self._nesting)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def watch_hidden(self, leaf: Tensor) -> None:
        """Watch a leaf that only a nested forward has shown."""
        node = get_gradient_edge(leaf).node
        if node not in self._watched:
            self._watch(node, leaf)

    def _watch(self, node: Node, leaf: Tensor) -> None:
        self._watched.add(node)
        self._handles.append(node.register_hook(lambda _, grads: self._accumulated(node, leaf, grads[0])))

    def _note_task(self, _: object) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    def _accumulated(self, node: Node, leaf: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if node in self._reported:
            raise LateGradientError(
                f"{describe(node)} needs to receive all of its gradient before it is reported as ready, and "
                "a nested backward of a custom Function added to it afterwards. Next: step this leaf after "
                "backward, without on_leaf_grad_ready, or checkpoint with use_reentrant=False."
            )
        nested = torch._C._current_graph_task_id() != self._task
        if self._nesting or nested:
            if not nested or node not in self._expected:
                self._waiting[node] = leaf
            return
        self._report(node, leaf)

    def _nested_done(self, node: Node) -> None:
        self._nesting.discard(node)
        if not self._nesting:
            waiting, self._waiting = self._waiting, {}
            for leaf_node, leaf in waiting.items():
                self._report(leaf_node, leaf)

    def _report(self, node: Node, leaf: Tensor) -> None:
        self._reported.add(node)
        if leaf.grad is not None:  # a hook of the user's may have taken it already
            self._callback(leaf, leaf.grad)


class _LeafFinder(TorchFunctionMode):
    """Sees the leaves that nested forwards use."""

    def __init__(self, leaves: _Leaves) -> None:
        super().__init__()
        self._leaves = leaves
        # A nested backward makes leaves of its own: detached copies of a checkpoint's inputs.
        self._born_here: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if (
                isinstance(value, Tensor)
                and value.is_leaf
                and value.requires_grad
                and value not in self._born_here
            ):
                self._leaves.watch_hidden(value)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_leaf:
                self._born_here[value] = True
        return result


def _is_leaf(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and value.requires_grad


@contextmanager
def reported_leaves(graph: Graph, callback: LeafCallback) -> Iterator[None]:
    """Call ``callback(leaf, gradient)`` once for every leaf while the context is open."""
    leaves = _Leaves(graph, callback)
    try:
        if leaves.has_nesting:
            with _LeafFinder(leaves):
                yield
        else:
            yield
    finally:
        leaves.close()
