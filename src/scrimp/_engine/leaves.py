"""Telling the user of each leaf as soon as its gradient is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from scrimp._engine.graph import Graph, describe, record_graph
from scrimp._engine.interrupted import undone
from scrimp._engine.own_pass import OwnPass
from scrimp.errors import LateGradientError

LeafCallback: TypeAlias = Callable[[Tensor, Tensor], object]

# Functions whose backward runs a forward and a backward of its own, with leaves that the graph does not show.
_NESTING = frozenset({"CheckpointFunctionBackward"})
_PASSES = frozenset({torch.autograd.backward, Tensor.backward})


class _Leaves:
    """Who has been reported, and who waits for a nesting node that might still add to its gradient."""

    def __init__(self, graph: Graph, callback: LeafCallback) -> None:
        self._callback = callback
        self._pass = OwnPass()
        self._nesting = {node for node in graph if node.name() in _NESTING}
        self._expected = {node for node, _ in graph.leaves}
        self._waiting: dict[Node, Tensor] = {}
        self._reported: set[Node] = set()
        self._watched: set[Node] = set()
        self._handles: list[RemovableHandle] = []
        for root in graph.roots:
            self._handles.append(root.register_prehook(lambda _, root=root: self._begun(root)))
        for node, leaf in graph.leaves:
            self._watch(node, leaf)
        self._finder = _LeafFinder(self.watch_nested)
        for node in self._nesting:
            self._find_inside(node)
            self._handles.append(node.register_hook(lambda *_, node=node: self._nested_done(node)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def watch_nested(self, graph: Graph, born_inside: WeakIdKeyDictionary) -> None:
        """Watch the leaves of a nested pass, but for those that the nesting node made for itself."""
        for node, leaf in graph.leaves:
            if node not in self._watched and leaf not in born_inside:
                self._watch(node, leaf)
        for node in graph:
            if node.name() in _NESTING:
                self._find_inside(node)

    def _begun(self, root: Node) -> None:
        """The first node of our pass: from here on it is known which pass that is."""
        self._pass.runs(root)

    def _find_inside(self, node: Node) -> None:
        """Look for passes while ``node`` runs; if it raises, the engine puts the thread's modes back."""
        self._handles.append(node.register_prehook(lambda _: self._finder.open()))
        self._handles.append(node.register_hook(lambda *_: self._finder.close()))

    def _watch(self, node: Node, leaf: Tensor) -> None:
        self._watched.add(node)
        self._handles.append(node.register_hook(lambda _, grads: self._accumulated(node, leaf, grads[0])))

    def _accumulated(self, node: Node, leaf: Tensor, gradient: Tensor | None) -> None:
        if gradient is None or self._pass.is_elsewhere(node):
            return
        if node in self._reported:
            raise LateGradientError(
                f"{describe(node)} needs to receive all of its gradient before it is reported as ready, and "
                "a nested backward of a custom Function added to it afterwards. Next: step this leaf after "
                "backward, without on_leaf_grad_ready, or checkpoint with use_reentrant=False."
            )
        nested = not self._pass.runs(node)
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
    """Sees the passes that run inside a nesting node, and which tensors were made there."""

    def __init__(self, found: Callable[[Graph, WeakIdKeyDictionary], None]) -> None:
        super().__init__()
        self._found = found
        # Checkpoints run their backward on detached copies of their inputs: leaves, and nobody else's
        # business.
        self._born_inside: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def open(self) -> None:
        """Enter, as a hook."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave, as a hook."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PASSES:
            roots = [value for value in tree_leaves(args[0]) if isinstance(value, Tensor)]
            self._found(record_graph(roots), self._born_inside)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_leaf:
                self._born_inside[value] = True
        return result


@contextmanager
def reported_leaves(graph: Graph, callback: LeafCallback) -> Iterator[None]:
    """Call ``callback(leaf, gradient)`` once for every leaf while the context is open."""
    leaves = _Leaves(graph, callback)
    try:
        yield
    finally:
        undone(leaves.close)
