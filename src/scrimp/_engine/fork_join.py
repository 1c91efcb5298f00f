"""Branches with graphs of their own, joined into one node of the outer graph.

A branch runs on copies of the inputs that share their memory and not their history (behind a
:class:`_Gate`), so its graph ends at gates and at leaves. The node that joins the branches has one input
for *each single gradient* that a plain backward pass would have added up at an outer tensor, in the
sequence in which it would have added them: the engine then does the very same additions, and no bit can
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from scrimp._engine.graph import Edge, Graph, describe, record_graph
from scrimp._engine.order import torch_order
from scrimp.errors import BranchError, GraphFreedError

# Runs one task per branch, somewhere; gives their results in sequence.
Runner: TypeAlias = Callable[[Sequence[Callable[[], Any]]], list[Any]]


class _Gate(torch.autograd.Function):
    """The identity, on memory that is shared, with an end of the graph behind it."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        # A branch's own pass ends before this node. Whoever gets here came past the joining node.
        raise BranchError(
            "a branch needs to return every tensor that is used after it, in a nest of tuples, lists and dicts, "
            "and one that it kept elsewhere (an attribute, an object of another type) was used in a backward "
            "pass. Next: return that tensor from the branch, or pass workers=1 to scrimp.parallel."
        )


@dataclass(frozen=True, slots=True)
class Gated:
    """A tensor behind a gate: what a branch is given, the gate's node, and what it stands for outside."""

    inside: Tensor
    gate: Node
    outside: Tensor


def gated(outside: Tensor) -> Gated:
    """Put ``outside``, which requires grad, behind a gate."""
    end = torch.empty(0, device=outside.device, requires_grad=True)
    with torch.enable_grad():
        inside: Tensor = _Gate.apply(end, outside.detach())  # type: ignore[no-untyped-call]
    assert inside.grad_fn is not None
    return Gated(inside, inside.grad_fn, outside)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One gradient that leaves a branch: the output ``index`` of ``source``, for the boundary node."""

    source: Node
    index: int
    boundary: Node


@dataclass(frozen=True, slots=True)
class Branch:
    """The graph of one branch between its outputs and its boundary."""

    outputs: tuple[GradientEdge, ...]
    interior: frozenset[Node]
    slots: tuple[_Slot, ...]
    outside: dict[Node, Tensor]


def trace_branch(outputs: Sequence[Tensor], gates: Sequence[Gated]) -> Branch:
    """Find where the graph of ``outputs`` ends, and every gradient that will leave it there, in sequence."""
    edges = tuple(get_gradient_edge(output) for output in outputs)
    graph = _up_to(record_graph(edges), frozenset(gate.gate for gate in gates))
    outside = {gate.gate: gate.outside for gate in gates} | dict(graph.leaves)
    slots = [
        _Slot(source, index, boundary)
        for source in torch_order(graph)
        for index, (boundary, _) in enumerate(source.next_functions)
        if boundary in outside
    ]
    interior = frozenset(node for node, following in graph.edges.items() if following)
    return Branch(edges, interior, tuple(slots), outside)


def _up_to(graph: Graph, gates: frozenset[Node]) -> Graph:
    """The graph without what lies behind the gates."""
    edges: dict[Node, tuple[Edge, ...]] = {}
    arriving = dict.fromkeys(graph.roots, 0)
    waiting = list(graph.roots)
    while waiting:
        node = waiting.pop()
        edges[node] = () if node in gates else graph.edges[node]
        for following, _ in edges[node]:
            if following not in arriving:
                arriving[following] = 0
                waiting.append(following)
            arriving[following] += 1
    return Graph(graph.roots, edges, arriving)


def join(values: Sequence[Sequence[Tensor]], branches: Sequence[Branch], runner: Runner) -> list[list[Tensor]]:
    """The branches' output values as outputs of one node that knows how to run their backward."""
    _refuse_shared(branches)
    slots = [branch.outside[slot.boundary] for branch in reversed(branches) for slot in branch.slots]
    if not slots:
        return [list(of_branch) for of_branch in values]
    flat = [value for of_branch in values for value in of_branch]
    state = _State(tuple(_without_inputs(branch) for branch in branches), runner)
    joined = iter(_Join.apply(state, flat, *slots))  # type: ignore[no-untyped-call]
    return [[next(joined) for _ in of_branch] for of_branch in values]


def _refuse_shared(branches: Sequence[Branch]) -> None:
    seen: set[Node] = set()
    for index, branch in enumerate(branches):
        shared = next(iter(seen & branch.interior), None)
        if shared is not None:
            raise _captured(index, shared)
        seen |= branch.interior


def _captured(index: int, node: Node) -> BranchError:
    return BranchError(
        f"branch {index} needs to get every tensor that has a history through its inputs, and uses the "
        f"output of {describe(node)}, made outside of it. Next: pass that tensor to scrimp.parallel as "
        "an input."
    )


@dataclass(frozen=True, slots=True)
class _State:
    """What the joining node remembers."""

    branches: tuple[Branch, ...]
    runner: Runner


class _Join(torch.autograd.Function):
    """The one node that stands for all branches."""

    @staticmethod
    def forward(ctx: Any, state: _State, values: list[Tensor], *slots: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.state = state
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BranchError(
                "create_graph=True needs the history of every branch, and branches that ran in threads "
                "have their own. Next: pass workers=1 to scrimp.parallel where you differentiate twice."
            )
        state: _State | None = ctx.state
        if state is None:
            raise GraphFreedError(_FREED)
        for index, branch in enumerate(state.branches):
            _refuse_nodes_of_this_pass(index, branch)
        waiting = iter(gradients)
        per_branch = [[next(waiting) for _ in branch.outputs] for branch in state.branches]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            # Branches that received no gradient are freed as well, with all that their forward saved.
            ctx.state = None
        return (None, None, *_differentiate(state, per_branch, keep))


_FREED = (
    "backward needs what the branches of scrimp.parallel saved, and an earlier pass freed it. Next: give "
    "retain_graph=True to that pass, or run the forward pass again."
)


def _without_inputs(branch: Branch) -> Branch:
    """The branch without its outer tensors, which would live, unneeded, as long as the node; leaves stay."""
    leaves = {node: outside for node, outside in branch.outside.items() if outside.is_leaf}
    return replace(branch, outside=leaves)


def _refuse_nodes_of_this_pass(index: int, branch: Branch) -> None:
    """A node that the outer pass runs as well is not the branch's own."""
    for node in branch.interior:
        if torch._C._will_engine_execute_node(node):
            raise _captured(index, node)


def _differentiate(state: _State, gradients: Sequence[Sequence[Tensor | None]], keep: bool) -> list[Tensor | None]:
    tasks = [
        partial(_contributions, branch, given, retain_graph=keep)
        for branch, given in zip(state.branches, gradients, strict=True)
    ]
    with _hooks_set_aside(state.branches):
        found = state.runner(tasks)
    return [gradient for of_branch in reversed(found) for gradient in of_branch]


def _contributions(branch: Branch, gradients: Sequence[Tensor | None], *, retain_graph: bool) -> list[Tensor | None]:
    """Run the branch's backward; return the gradient of every slot."""
    given = [(edge, gradient) for edge, gradient in zip(branch.outputs, gradients, strict=True) if gradient is not None]
    if not given:
        return [None] * len(branch.slots)
    boundary = list(dict.fromkeys(slot.boundary for slot in branch.slots))
    single: dict[tuple[Node, int], Tensor | None] = {}
    with _collecting(branch, single):
        totals = torch.autograd.grad(
            [edge for edge, _ in given],
            [GradientEdge(node, 0) for node in boundary],
            [gradient for _, gradient in given],
            retain_graph=retain_graph,
            allow_unused=True,
        )
    total = dict(zip(boundary, totals, strict=True))
    shared = _shared_boundaries(branch)
    return [
        single.get((slot.source, slot.index)) if slot.boundary in shared else total[slot.boundary]
        for slot in branch.slots
    ]


def _shared_boundaries(branch: Branch) -> frozenset[Node]:
    """Boundary nodes that receive several gradients: the engine only tells their sum."""
    seen: set[Node] = set()
    twice: set[Node] = set()
    for slot in branch.slots:
        (twice if slot.boundary in seen else seen).add(slot.boundary)
    return frozenset(twice)


@contextmanager
def _collecting(branch: Branch, into: dict[tuple[Node, int], Tensor | None]) -> Iterator[None]:
    """Note each single gradient for the boundary nodes that receive several."""
    shared = _shared_boundaries(branch)
    slots_of: dict[Node, list[int]] = {}
    for slot in branch.slots:
        if slot.boundary in shared:
            slots_of.setdefault(slot.source, []).append(slot.index)
    handles: list[RemovableHandle] = []

    def note(source: Node, made: Sequence[Tensor | None]) -> None:
        for index in slots_of[source]:
            into[source, index] = made[index]

    try:
        for source in slots_of:
            handles.append(source.register_hook(lambda made, _, source=source: note(source, made)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooks_set_aside(branches: Sequence[Branch]) -> Iterator[None]:
    """Keep the hooks of leaves from running on a branch's part: the outer pass runs them on the whole."""
    dicts = {
        id(hooks): hooks
        for branch in branches
        for leaf in branch.outside.values()
        if leaf.is_leaf and (hooks := leaf._backward_hooks)
    }
    kept = [(hooks, list(hooks.items())) for hooks in dicts.values()]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, items in kept:
            hooks.update(items)
