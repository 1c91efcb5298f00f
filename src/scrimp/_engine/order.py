"""In which sequence the nodes run: Kahn's algorithm over the recorded graph, imposed on PyTorch's engine.

The engine runs, of the nodes that are ready, the one with the highest sequence number. Numbers that fall
along a topological order therefore make it follow that order; everything else that it does stays as it is.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

from torch.autograd.graph import Node

from scrimp._engine.graph import Edge, Graph
from scrimp._engine.interrupted import undone
from scrimp._engine.memory_order import memory_order

OrderName: TypeAlias = Literal["torch", "depth-first", "memory"]
Priority: TypeAlias = Callable[[Node], float]
Order: TypeAlias = OrderName | Priority

# Numbers at and above this one are ours; PyTorch counts forward operators from zero and never gets here.
# A node that carries one is being run by another backward pass of ours, in another thread or around this one.
# That pass will put the number back; this one leaves the node alone.
_IMPOSED = 1 << 62


def plan_order(graph: Graph, order: Order) -> list[Node] | None:
    """The inner nodes in the sequence in which they shall run; ``None`` where that is PyTorch's own.

    Leaves are not listed: PyTorch accumulates a leaf's gradient as soon as it is complete, in every order.
    """
    match order:
        case "torch":
            return None
        case "depth-first":
            planned = depth_first(graph)
        case "memory":
            planned = memory_order(graph, torch_order(graph), depth_first(graph))
        case _ if callable(order):
            planned = by_priority(graph, order)
        case _:
            raise ValueError(
                "order needs to be 'torch', 'depth-first', 'memory' or a function of a node, and is "
                f"{order!r}. Next: pass one of these."
            )
    return None if _falls(planned) else planned


def _falls(order: Sequence[Node]) -> bool:
    """Whether the numbers that the nodes have fall along ``order``: then PyTorch follows it without being told."""
    numbers = [node._sequence_nr() for node in order]
    return all(map(operator.gt, numbers, numbers[1:]))


def torch_order(graph: Graph) -> list[Node]:
    """PyTorch's order: of the ready nodes, the one whose operator ran last in the forward pass."""
    return by_priority(graph, lambda node: 0.0)


def depth_first(graph: Graph) -> list[Node]:
    """Of the ready nodes, the one that became ready last: a branch is finished before the next is begun."""
    edges, missing = graph.edges, dict(graph.arriving)
    ready = sorted((node for node in graph.roots if not missing[node]), key=_number)
    order = []
    while ready:
        node = ready.pop()
        following = edges[node]
        if not following:
            continue
        order.append(node)
        before = len(ready)
        for after, _ in following:
            left = missing[after] = missing[after] - 1
            if not left:
                ready.append(after)
        if len(ready) > before + 1:
            ready[before:] = sorted(ready[before:], key=_number)
    return order


def by_priority(graph: Graph, priority: Priority) -> list[Node]:
    """Of the ready nodes, the one with the highest priority; of equals, the later forward operator."""
    missing = dict(graph.arriving)
    arrivals = iter(range(len(graph)))
    ready: list[tuple[float, int, int, Node]] = []

    def add(node: Node) -> None:
        if graph.edges[node]:
            heapq.heappush(ready, (-priority(node), -_number(node), next(arrivals), node))

    for node in graph.roots:
        if not missing[node]:
            add(node)
    order = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for following in _release(graph.edges[node], missing):
            add(following)
    return order


def _release(edges: Sequence[Edge], missing: dict[Node, int]) -> list[Node]:
    """Count the gradients that a node hands on; return the nodes that have all of theirs now."""
    complete = []
    for following, _ in edges:
        missing[following] -= 1
        if not missing[following]:
            complete.append(following)
    return complete


def _number(node: Node) -> int:
    return node._sequence_nr()


@contextmanager
def imposed(order: Sequence[Node] | None) -> Iterator[None]:
    """Make PyTorch's engine follow ``order`` while the context is open; put the numbers back afterwards.

    Nothing is imposed where one node's number cannot be set (custom Functions have no setter in some versions
    of PyTorch): half an order is none.
    """
    nodes: Sequence[Any] = order or ()
    if not all(hasattr(kind, "_set_sequence_nr") for kind in {type(node) for node in nodes}):
        nodes = ()
    numbered = [(number, node) for node in nodes if (number := node._sequence_nr()) < _IMPOSED]
    try:
        for number, (_, node) in enumerate(reversed(numbered), _IMPOSED):
            node._set_sequence_nr(number)
        yield
    finally:
        undone(partial(_renumber, numbered))


def _renumber(numbered: Sequence[tuple[int, Any]]) -> None:
    for number, node in numbered:
        node._set_sequence_nr(number)
