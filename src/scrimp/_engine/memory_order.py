"""The order that frees the most first, and the simulation that says whether it pays."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch.autograd.graph import Node

from scrimp._engine.graph import Edge, Graph

# Nodes that hand their incoming gradient on, or a view of it: their outputs cost no memory of their own.
_HANDS_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Add", "Alias", "Cat", "Detach", "Permute", "ReshapeAlias", "Squeeze", "SqueezeMultiple",
        "Stack", "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
    )
    for number in range(4)
)  # fmt: skip
# Nodes whose outputs are views of one storage with a single element, whatever their shape.
_EXPANDS = frozenset({"SumBackward0", "MeanBackward0"})


@dataclass(frozen=True, slots=True)
class _Node:
    """What one node costs and frees."""

    saved: tuple[int, ...]
    incoming: tuple[int, ...]
    outgoing: tuple[tuple[Edge, int], ...]
    hands_on: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything that a backward pass frees and makes, by node and by saved storage."""

    nodes: dict[Node, _Node]
    storages: dict[int, int]
    holders: Counter[int]


# Sizes are read off the nodes, and a node's own temporaries are not among them: smaller gains, and those of one
# or two tensors, may not be real.
_LEAST_GAIN = 0.1
_LEAST_TENSORS = 2


def memory_order(graph: Graph, usual: list[Node], other: list[Node]) -> list[Node]:
    """Of ``other`` and the greedy order the one with the lower predicted peak, if it gains enough."""
    sizes = measure(graph)
    largest = max((size for facts in sizes.nodes.values() for size in facts.incoming), default=0)
    before = predicted_peak(usual, graph, sizes)
    least = max(_LEAST_GAIN * before, _LEAST_TENSORS * largest)
    if before - sum(sizes.storages.values()) <= least:  # what the forward pass saved is there in any order
        return usual
    peak, best = min(
        ((predicted_peak(order, graph, sizes), order) for order in (other, _greedy(graph, sizes))),
        key=lambda pair: pair[0],
    )
    return best if before - peak > least else usual


def measure(graph: Graph) -> Sizes:
    """Read shapes and saved tensors off the nodes, without unpacking anything."""
    # By identity: the storages of wrapping subclasses have no address.
    owned = {leaf.untyped_storage()._cdata for _, leaf in graph.leaves if _is_dense(leaf)}
    reader = _SavedReader()
    storages: dict[int, int] = {}
    holders: Counter[int] = Counter()
    slots = {node: _slot_bytes(node) for node in graph}
    nodes = {}
    for node, edges in graph.edges.items():
        kept = {key: size for key, size in reader.storages(node) if key not in owned}
        storages |= kept
        holders.update(kept.keys())
        size_of = [(edge, slots[edge[0]][edge[1]]) for edge in edges]
        if node.name() in _EXPANDS:
            size_of = [(edge, 0) for edge, _ in size_of]
        nodes[node] = _Node(tuple(kept), slots[node], tuple(size_of), node.name() in _HANDS_ON)
    return Sizes(nodes, storages, holders)


def _slot_bytes(node: Node) -> tuple[int, ...]:
    return tuple(
        0 if meta.is_nested_tensor else prod(meta.shape) * meta.dtype.itemsize for meta in node._input_metadata
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


class _SavedReader:
    """Reads what nodes hold, without unpacking it."""

    def __init__(self) -> None:
        self._names: dict[type, list[str]] = {}  # dir() is slow, and graphs have few kinds of nodes

    def storages(self, node: Node) -> list[tuple[int, int]]:
        """Identity and bytes of each dense storage that ``node`` holds: not of what hooks have packed away."""
        found = []
        for saved in self._raw(node):
            held = getattr(saved, "data", None)
            if isinstance(held, torch.Tensor) and _is_dense(held):
                storage = held.untyped_storage()
                found.append((storage._cdata, storage.nbytes()))
        return found

    def _raw(self, node: Node) -> list[object]:
        kind = type(node)
        if kind not in self._names:
            self._names[kind] = [name for name in dir(kind) if name.startswith("_raw_saved")]
        found: list[object] = []
        for name in self._names[kind]:
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed already: the pass itself will say so
                continue
            found.extend(value if isinstance(value, tuple | list) else [value])
        return found


@dataclass(slots=True)
class _Ledger:
    """Live bytes while a backward pass is played through; gradients that share memory share a token."""

    live: int
    peak: int = 0
    bytes_of: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)

    def make(self, size: int) -> int:
        self.bytes_of.append(size)
        self.users.append(1)
        self.live += size
        self.peak = max(self.peak, self.live)
        return len(self.users) - 1

    def drop(self, token: int) -> None:
        self.users[token] -= 1
        if not self.users[token]:
            self.live -= self.bytes_of[token]


def predicted_peak(order: Sequence[Node], graph: Graph, sizes: Sizes) -> int:
    """Play ``order`` through and return the highest number of bytes that are live at once."""
    ledger = _Ledger(live=sum(sizes.storages.values()))
    ledger.peak = ledger.live
    holders = sizes.holders.copy()
    slots: dict[Edge, int] = {}
    for root in graph.roots:
        for index, size in enumerate(sizes.nodes[root].incoming):
            slots[root, index] = ledger.make(size)
    for node in order:
        facts = sizes.nodes[node]
        mine = [slots.pop((node, index), None) for index in range(len(facts.incoming))]
        incoming = [token for token in mine if token is not None]
        for edge, size in facts.outgoing:
            if facts.hands_on and incoming:
                ledger.users[incoming[0]] += 1
                token = incoming[0]
            else:
                token = ledger.make(size)
            slots[edge] = _add(ledger, slots.get(edge), token, size)
        for token in incoming:
            ledger.drop(token)
        for storage in facts.saved:
            holders[storage] -= 1
            if not holders[storage]:
                ledger.live -= sizes.storages[storage]
    return ledger.peak


def _add(ledger: _Ledger, held: int | None, token: int, size: int) -> int:
    """The token of a slot after one more gradient arrived there."""
    if held is None:
        return token
    if ledger.users[held] == 1:  # PyTorch adds in place to a gradient that nobody else holds
        ledger.drop(token)
        return held
    total = ledger.make(size)
    ledger.drop(held)
    ledger.drop(token)
    return total


def _greedy(graph: Graph, sizes: Sizes) -> list[Node]:
    """Of the ready nodes, take the one that frees most, net of the gradients that it is first to make."""
    missing = dict(graph.arriving)
    holders = sizes.holders.copy()
    begun: set[Edge] = set()
    ready: list[tuple[int, int, int, Node]] = []
    arrivals = iter(range(len(graph)))

    def add(node: Node) -> None:
        facts = sizes.nodes[node]
        if not graph.edges[node]:
            return
        freed = sum(sizes.storages[key] for key in facts.saved if holders[key] == 1)
        made = 0
        if not facts.hands_on:
            freed += sum(facts.incoming)
            made = sum(size for edge, size in facts.outgoing if edge not in begun)
        heapq.heappush(ready, (made - freed, -node._sequence_nr(), next(arrivals), node))

    for node in graph.roots:
        if not missing[node]:
            add(node)
    order = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        holders.subtract(sizes.nodes[node].saved)
        begun.update(graph.edges[node])
        for following, _ in graph.edges[node]:
            missing[following] -= 1
            if not missing[following]:
                add(following)
    return order
