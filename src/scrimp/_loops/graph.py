"""Where the graph of one step ends: at its arguments, and at tensors from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from scrimp._loops.outside import Source
from scrimp.errors import LoopError

_LEAF = "torch::autograd::AccumulateGrad"
_LOOP = "LoopBackward"


def borders(
    results: Iterable[Tensor],
    arguments: set[int],
    entry: Node | None,
    sources: Mapping[Source, Tensor],
    since: int,
    made: Callable[[Tensor], bool],
) -> tuple[list[Tensor], bool]:
    """Return the tensors from outside that ``results`` of a step depend on, each once, and whether there are loops.

    Args:
        results: what the step returned.
        arguments: ``id`` of the leaves that it was given.
        entry: what gave it its arguments, where they are no leaves.
        sources: tensors that have a history from before the loop.
        since: nodes with smaller sequence numbers are older than the step.
        made: tells of a leaf whether the step made it, so that it is nobody else's.
    """
    found: dict[int, Tensor] = {}
    seen: set[Node] = set()
    waiting: list[Node] = []
    has_loops = False

    def visit(node: Node | None, number: int) -> None:
        if node is None or node is entry or node in seen:
            return
        nonlocal has_loops
        name = node.name()
        is_leaf = name == _LEAF
        source = node.variable if is_leaf else sources.get((node, number))  # type: ignore[attr-defined]
        if source is not None:
            if id(source) not in arguments and not (is_leaf and made(source)):
                found[id(source)] = source
        elif node._sequence_nr() < since:
            raise LoopError(
                f"a step of the loop reads a tensor with a history of its own (made by {name}) that could not "
                "be found: an earlier step left it somewhere, or a custom autograd.Function takes it from outside. "
                "Make it a part of the state or of xs, or detach it"
            )
        else:
            seen.add(node)
            waiting.append(node)
            has_loops = has_loops or name == _LOOP

    for result in results:
        if result.grad_fn is not None:
            visit(result.grad_fn, result.output_nr)
        elif result.requires_grad and id(result) not in arguments and not made(result):
            found[id(result)] = result
    while waiting:
        for node, number in waiting.pop().next_functions:
            visit(node, number)
    return list(found.values()), has_loops


def loops_behind(results: Sequence[Tensor], targets: Iterable[Tensor]) -> tuple[list[Any], set[int]]:
    """Return the nodes of loops in the graph of a step, and the ``id`` of those targets that nothing else uses."""
    loops: list[Any] = []
    users: dict[int, bool] = {id(result): False for result in results}
    seen: set[Node] = set()
    waiting = [result.grad_fn for result in results if result.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_loop = node.name() == _LOOP
        if is_loop:
            loops.append(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following.name() == _LEAF:
                key = id(following.variable)  # type: ignore[attr-defined]
                users[key] = users.get(key, True) and is_loop
            else:
                waiting.append(following)
    return loops, {id(target) for target in targets if users.get(id(target), False)}
