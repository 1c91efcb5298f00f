"""A backward pass whose independent branches run in several threads, where that pays.

PyTorch's engine runs each part of the graph: from the gradients that earlier parts made for it, until its last node
has run; there a hook ends the pass. So each node runs once, with the whole gradient, all of its hooks and the freeing
of what it saved. (To end a pass by asking for gradients at the cut would not do: the engine runs tensor hooks where a
gradient is asked for, and again where the next part begins.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from scrimp._engine.clock import Clock
from scrimp._engine.cost import Contest, Memory, predicted_seconds, promises_gain
from scrimp._engine.graph import Graph, Root, describe, node_of, record_graph, shape_at
from scrimp._engine.interrupted import undone
from scrimp._engine.numbered import shape_of
from scrimp._engine.observe import Gradients, Watch
from scrimp._engine.order import imposed
from scrimp._engine.own_pass import OwnPass
from scrimp._engine.split import Crossing, Part, Shape, Split, splits
from scrimp._engine.workers import Workers, can_be_threaded, crew_of, run_tasks
from scrimp.errors import BackwardError

# Runs a pass: from these roots, with these gradients.
Pass: TypeAlias = Callable[[Sequence[Root], Sequence[Tensor | None]], None]

_GLANCE = 4
# Beginning and ending a pass of PyTorch's engine: about this, on a 2-core x86-64 CPU.
_SECONDS_PER_PART = 100e-6
# Graphs that look alike at a glance and differ further down are learned anew, so often.
_MOST_SHAPES = 4


def run_pass(run: Pass, roots: Sequence[Root], gradients: Sequence[Tensor | None], workers: Workers) -> None:
    """Run the pass: branches in threads where that is possible and, with ``"auto"``, faster; else just ``run``."""
    threads = torch.get_num_threads()
    crew = crew_of(workers, threads)
    if crew < 2 or not roots:
        run(roots, gradients)
        return
    known = _memory.entry((_glance(roots), threads, crew, workers))
    if known.is_settled or not _possible(roots):
        run(roots, gradients)
        return
    if not known.wants_to_know:
        with known.contest.timed(threaded=False):
            run(roots, gradients)
        return
    graph = record_graph(roots)
    shape = shape_of(graph)
    split = known.split_for(shape)
    if split is None:
        known.learn(shape, graph, partial(run, roots, gradients), None if workers != "auto" else crew)
        return
    with known.contest.timed(threaded=True):
        _Parts(list(graph), run).run_all(split, partial(run, roots, gradients), crew, threads)


class _Known:
    """What earlier passes over graphs of one look have taught."""

    def __init__(self) -> None:
        self.contest = Contest()
        self._cut: tuple[Shape, Split] | None = None
        self._always = False
        self._learned = 0

    @property
    def is_settled(self) -> bool:
        """Whether such passes will stay whole from now on, and nothing is left to be measured."""
        return not self.wants_to_know and (self._cut is None or self.contest.knows_one_by_one)

    @property
    def wants_to_know(self) -> bool:
        """Whether the next pass has to look at its graph: to learn from it, or to run it in threads."""
        return not self._learned or (self._cut is not None and (self._always or self.contest.threaded))

    def split_for(self, shape: Shape | None) -> Split | None:
        """The cut for graphs of this shape, if it is known."""
        cut = self._cut  # read once: other threads may learn meanwhile
        return cut[1] if cut is not None and cut[0] == shape else None

    def learn(self, shape: Shape | None, graph: Graph, run: Callable[[], None], crew: int | None) -> None:
        """Run the pass as it is and measure its nodes; decide how graphs of this shape shall be run.

        Args:
            shape: The graph's; ``None`` if it cannot be cut.
            graph: The graph.
            run: Runs the pass.
            crew: How many threads there are for a cut that pays; ``None`` to cut whether it pays or not.
        """
        split = None
        if shape is None or self._learned >= _MOST_SHAPES:
            run()
        else:
            clock = Clock()
            with Watch(list(graph), [clock]):
                run()
            if not (clock.saw_python or clock.saw_nothing):
                split = _best(list(splits(shape)), [clock.seconds.get(node, 0.0) for node in graph], crew)
        self._learned += 1
        self.contest, self._always = Contest(), crew is None
        self._cut = None if shape is None or split is None else (shape, split)


_memory: Memory[_Known] = Memory(_Known)


def _best(found: Sequence[Split], costs: Sequence[float], crew: int | None) -> Split | None:
    """The fastest cut by the model; if ``crew`` says how many threads there are, ``None`` where none pays."""
    best, least = None, inf
    for split in found:
        outside, branches = split.seconds(costs)
        outside += _SECONDS_PER_PART * (len(branches) + 2)
        seconds = outside + predicted_seconds(branches, crew or 2)
        if seconds < least and (crew is None or promises_gain(outside, branches, crew)):
            best, least = split, seconds
    return best


def _possible(roots: Sequence[Root]) -> bool:
    """Whether this is a pass that nothing else depends on as a whole."""
    return (
        can_be_threaded()
        and torch._C._current_graph_task_id() == -1
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        and sys.getprofile() is None
        and all(node_of(root) is not None for root in roots)
    )


def _glance(roots: Sequence[Root]) -> Hashable:
    """Names, and a shape at both ends, at the beginning of the pass: cheap, and rarely equal for graphs that differ."""
    seen: list[Hashable] = [len(roots)]
    for end in (0, -1):
        node = after = node_of(roots[0])
        for _ in range(_GLANCE):
            if after is None:
                break
            node = after
            seen.append(node.name())
            following = node.next_functions
            after = following[end][0] if following else None
        seen.append(shape_at(node, 0) if node is not None and node._input_metadata else None)
    return tuple(seen)


class _PartDone(Exception):  # noqa: N818 - no error
    """Ends a pass after the last node of its part."""


class _Parts:
    """Runs the parts of a pass, and carries gradients from one to the other."""

    def __init__(self, nodes: Sequence[Node], run: Pass) -> None:
        self._nodes = nodes
        self._run = run
        self._made: dict[tuple[int, int], Tensor | None] = {}
        # By thread. Leaves belong to other graphs as well: what other passes do with them meanwhile is not this one.
        self._passes: dict[int, OwnPass] = {}
        self._handles: list[RemovableHandle] = []

    def run_all(self, split: Split, run_head: Callable[[], None], crew: int, threads: int) -> None:
        """Run the head, then the branches in threads, then the tail."""
        try:
            self._note([*(c for branch in split.branches for c in branch.incoming), *split.tail.incoming])
            for part in (split.head, *split.branches):
                self._end_after(part)
            # Numbers of the head alone need to be set: below it every branch comes before what follows it.
            with imposed([self._nodes[node] for node in split.head.nodes]):
                self._until_done(run_head)
            tasks = [partial(self._until_done, partial(self._run_part, branch)) for branch in split.branches]
            run_tasks(tasks, crew, threads)
            self._run_part(split.tail)
        finally:
            undone(self._unhook)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _until_done(self, run: Callable[[], None]) -> None:
        thread = threading.get_ident()
        self._passes[thread] = OwnPass()
        try:
            _until_done(run)
        finally:
            del self._passes[thread]

    def _runs(self, node: int) -> bool:
        """Whether it is a part of this pass that runs ``node`` now."""
        own = self._passes.get(threading.get_ident())
        return own is not None and own.runs(self._nodes[node])

    def _run_part(self, part: Part) -> None:
        edges, gradients = [], []
        for crossing in part.incoming:
            gradient = self._made.pop((crossing.source, crossing.index))
            if gradient is None:
                raise _without_gradient(self._nodes[crossing.source])
            edges.append(GradientEdge(self._nodes[crossing.target], crossing.slot))
            gradients.append(gradient)
        if edges:
            self._run(edges, gradients)

    def _note(self, crossings: Sequence[Crossing]) -> None:
        """Keep what crosses into another part."""
        wanted: dict[int, list[int]] = {}
        for crossing in crossings:
            wanted.setdefault(crossing.source, []).append(crossing.index)

        def note(source: int, made: Gradients, received: Gradients) -> None:
            for index in wanted[source] if self._runs(source) else ():
                self._made[source, index] = made[index]

        for source in wanted:
            self._handles.append(self._nodes[source].register_hook(partial(note, source)))

    def _end_after(self, part: Part) -> None:
        """End the pass when the last node has run, and been freed, and its leaves have their gradients."""
        left = set(part.last)

        def done(node: int, made: Gradients, received: Gradients) -> None:
            if self._runs(node):
                left.discard(node)
                if not left:
                    raise _PartDone

        for node in part.last:
            self._handles.append(self._nodes[node].register_hook(partial(done, node)))


def _until_done(run: Callable[[], None]) -> None:
    try:
        run()
    except _PartDone:
        # The engine's queue, which is this thread's, still holds what comes after, and a thread should not end with
        # nodes to destroy. The next pass empties it.
        torch.autograd.backward(torch.ones((), requires_grad=True))


def _without_gradient(node: Node) -> BackwardError:
    return BackwardError(
        f"branches in threads need every gradient that {describe(node)} made in earlier passes over such a graph, and "
        "now it made none: a hook must have taken it. Next: run this pass without workers."
    )
