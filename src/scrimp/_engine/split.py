"""Where a recorded graph can be cut into a head, branches that are independent of each other, and a tail.

The parts are run one after the other, the branches at the same time; each node runs once, in one of them. Nothing
here knows PyTorch: a graph is a list of numbered nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

HEAD: Final = -1
TAIL: Final = -2
# How far down branches may begin, in nodes with saved tensors, and how many there may be.
_LONGEST_HEAD = 32
_MOST_BRANCHES = 64

Edge = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """A graph by numbers. Graphs of one shape are cut alike.

    Attributes:
        edges: For every node its edges: the index of the output, and the number and the input slot of the node that
            follows. A node without edges is a leaf.
        ranked: The nodes from the earliest forward operator to the latest; leaves come last.
        roots: The nodes at which the pass begins.
        light: The inner nodes that hold no saved tensors.
    """

    edges: tuple[tuple[Edge, ...], ...]
    ranked: tuple[int, ...]
    roots: tuple[int, ...]
    light: frozenset[int]
    _order: tuple[int, ...] | None = field(default=None, init=False, compare=False)
    _ranks: dict[int, int] | None = field(default=None, init=False, compare=False)

    # Both are computed when they are first asked for. In Python 3.11 functools.cached_property would take a lock, and a
    # process that another thread forks meanwhile would wait for that for ever.

    @property
    def order(self) -> tuple[int, ...]:
        """The inner nodes in the order in which PyTorch runs them."""
        if self._order is None:
            object.__setattr__(self, "_order", tuple(self.run_from(self.roots)))
        assert self._order is not None
        return self._order

    @property
    def ranks(self) -> dict[int, int]:
        """For every node its place in ``ranked``."""
        if self._ranks is None:
            object.__setattr__(self, "_ranks", {node: rank for rank, node in enumerate(self.ranked)})
        assert self._ranks is not None
        return self._ranks

    def run_from(self, starts: Iterable[int]) -> Iterator[int]:
        """Play a pass: of the inner nodes that are ready, the latest operator."""
        starts = list(starts)
        missing = dict.fromkeys(starts, 0)
        waiting = list(missing)
        while waiting:
            for _, target, _ in self.edges[waiting.pop()]:
                if target not in missing:
                    missing[target] = 0
                    waiting.append(target)
                missing[target] += 1
        ready = [(-self.ranks[node], node) for node in starts if not missing[node] and self.edges[node]]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[1]
            yield node
            for _, target, _ in self.edges[node]:
                missing[target] -= 1
                if not missing[target] and self.edges[target]:
                    heapq.heappush(ready, (-self.ranks[target], target))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A gradient that one part makes for another: the output ``index`` of ``source``."""

    source: int
    index: int
    target: int
    slot: int


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that run together, in PyTorch's order.

    Attributes:
        nodes: The inner nodes.
        incoming: What they receive from earlier parts, in the sequence in which PyTorch adds it up.
        last: Those after which nothing of the part is left to run: the last inner node and its leaves.
    """

    nodes: tuple[int, ...]
    incoming: tuple[Crossing, ...]
    last: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The parts: first the head, then the branches, in any order or at the same time, then the tail."""

    head: Part
    branches: tuple[Part, ...]
    tail: Part

    def seconds(self, costs: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """What head and tail take together, and what each branch takes, given what each node does."""
        outside = sum(costs[node] for part in (self.head, self.tail) for node in part.nodes)
        return outside, tuple(sum(costs[node] for node in branch.nodes) for branch in self.branches)


def splits(shape: Shape) -> Iterator[Split]:
    """All cuts that were found: the further down the branches begin, the longer the head."""
    head: set[int] = set()
    arrived = dict.fromkeys(range(len(shape.edges)), 0)
    for edges in shape.edges:
        for _, target, _ in edges:
            arrived[target] += 1
    border = [root for root in shape.roots if not arrived[root]]
    for _ in range(_LONGEST_HEAD):
        _take_light(shape, head, border, arrived)
        if len(border) > 1 and head and (split := _cut(shape, head)) is not None:
            yield split
        if not border:
            return
        _take(shape, max(border, key=shape.ranks.__getitem__), head, border, arrived)


def _take_light(shape: Shape, head: set[int], border: list[int], arrived: dict[int, int]) -> None:
    while light := [node for node in border if node in shape.light]:
        for node in light:
            _take(shape, node, head, border, arrived)


def _take(shape: Shape, node: int, head: set[int], border: list[int], arrived: dict[int, int]) -> None:
    border.remove(node)
    head.add(node)
    for _, target, _ in shape.edges[node]:
        arrived[target] -= 1
        if not arrived[target] and shape.edges[target]:
            border.append(target)


def _cut(shape: Shape, head: set[int]) -> Split | None:
    part_of = _colored(shape, head)
    branches_begun = len({part for part in part_of if part >= 0})
    if branches_begun < 2 or not (_leaves_belong(shape, part_of) and _adds_up_alike(shape, part_of)):
        return None
    nodes: dict[int, list[int]] = {HEAD: []}
    into: dict[int, list[Crossing]] = {}
    for source in shape.order:
        nodes.setdefault(part_of[source], []).append(source)
        for index, target, slot in shape.edges[source]:
            if part_of[target] != part_of[source]:
                into.setdefault(part_of[target], []).append(Crossing(source, index, target, slot))
    parts = {
        part: Part(tuple(inner), tuple(into.get(part, ())), _last(shape, inner[-1])) for part, inner in nodes.items()
    }
    tail = parts.pop(TAIL, Part((), (), ()))
    first, *branches = parts.values()
    if not 1 < len(branches) <= _MOST_BRANCHES or not all(_stops(shape, part) for part in (first, *branches)):
        return None
    return Split(first, tuple(branches), tail) if all(_runs_alone(shape, branch) for branch in branches) else None


def _colored(shape: Shape, head: set[int]) -> list[int]:
    """The part of every node: those right below the head begin a branch each; where branches meet the tail begins.

    A leaf belongs to the part that makes its gradient.
    """
    part_of: list[int | None] = [None] * len(shape.edges)
    for node in shape.order:
        part = HEAD if node in head else part_of[node]
        if part is None:
            part = node
        part_of[node] = part
        for _, target, _ in shape.edges[node]:
            if shape.edges[target]:
                if part != HEAD:
                    part_of[target] = part if part_of[target] in (None, part) else TAIL
            else:
                part_of[target] = part
    return [TAIL if part is None else part for part in part_of]


def _leaves_belong(shape: Shape, part_of: Sequence[int]) -> bool:
    """Whether every leaf receives all of its gradients in one part, and none is a root."""
    whole = all(
        part_of[source] == part_of[target]
        for source in shape.order
        for _, target, _ in shape.edges[source]
        if not shape.edges[target]
    )
    return whole and all(part_of[root] == HEAD for root in shape.roots)


def _adds_up_alike(shape: Shape, part_of: Sequence[int]) -> bool:
    """Whether every sum keeps PyTorch's sequence of terms, although those from earlier parts come first."""
    begun: set[tuple[int, int]] = set()
    for source in shape.order:
        for _, target, slot in shape.edges[source]:
            if part_of[source] == part_of[target]:
                begun.add((target, slot))
            elif (target, slot) in begun:
                return False
    return True


def _last(shape: Shape, node: int) -> tuple[int, ...]:
    return node, *dict.fromkeys(target for _, target, _ in shape.edges[node] if not shape.edges[target])


def _stops(shape: Shape, part: Part) -> bool:
    """Whether the pass can be ended after this part with nothing left to free at its last node."""
    return len(part.last) > 1 or part.last[0] in shape.light


def _runs_alone(shape: Shape, branch: Part) -> bool:
    """Whether a pass from the branch's beginning runs all of the branch before anything else."""
    run = shape.run_from(dict.fromkeys(crossing.target for crossing in branch.incoming))
    return all(next(run, None) == node for node in branch.nodes)
