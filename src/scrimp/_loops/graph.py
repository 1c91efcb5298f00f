"""Where the graph of one step ends: at its arguments, and at tensors from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.autograd.graph import Node

from scrimp._loops.outside import Source
from scrimp.errors import LoopError


def borders(
    results: Iterable[Tensor],
    arguments: set[int],
    entry: Node | None,
    sources: Mapping[Source, Tensor],
    since: int,
    made: Callable[[Tensor], bool],
) -> list[Tensor]:
    """Return the tensors from outside that ``results`` of a step depend on, each once.

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

    def visit(node: Node | None, number: int) -> None:
        if node is None or node is entry or node in seen:
            return
        is_leaf = node.name() == "torch::autograd::AccumulateGrad"
        source = node.variable if is_leaf else sources.get((node, number))  # type: ignore[attr-defined]
        if source is not None:
            if id(source) not in arguments and not (is_leaf and made(source)):
                found[id(source)] = source
        elif node._sequence_nr() < since:
            raise LoopError(
                f"a step of the loop reads a tensor with a history of its own (made by {node.name()}) that could not "
                "be found: an earlier step left it somewhere, or a custom autograd.Function takes it from outside. "
                "Make it a part of the state or of xs, or detach it"
            )
        else:
            seen.add(node)
            waiting.append(node)

    for result in results:
        if result.grad_fn is not None:
            visit(result.grad_fn, result.output_nr)
        elif result.requires_grad and id(result) not in arguments and not made(result):
            found[id(result)] = result
    while waiting:
        for node, number in waiting.pop().next_functions:
            visit(node, number)
    return list(found.values())
