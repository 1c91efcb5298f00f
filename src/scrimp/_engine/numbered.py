"""A recorded graph as numbers, if it is one that may be cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from scrimp._engine.graph import Graph
from scrimp._engine.split import Shape


def shape_of(graph: Graph) -> Shape | None:
    """The graph by numbers; ``None`` where it must not be cut.

    That is where PyTorch's order is not known (numbers that occur twice, from forward passes in several threads),
    where nodes are on other devices, and where saved tensors are unpacked by Python code: checkpoints, sessions.
    """
    number = {node: index for index, node in enumerate(graph)}
    numbers = [node._sequence_nr() for node in number]
    ends = sum(not edges for edges in graph.edges.values())
    inner = [nr for nr, edges in zip(numbers, graph.edges.values(), strict=True) if edges]
    if ends != len(graph.leaves) or len(set(inner)) != len(inner) or not _all_on_the_cpu(graph):
        return None
    saves = {kind: [name for name in dir(kind) if name.startswith("_raw_saved")] for kind in {type(n) for n in number}}
    if any(_unpacked_by_python(node, names) for node in number if (names := saves[type(node)])):
        return None
    edges = tuple(
        tuple((index, number[after], slot) for index, (after, slot) in enumerate(node.next_functions) if after)
        for node in number
    )
    return Shape(
        edges=edges,
        ranked=tuple(sorted(range(len(numbers)), key=numbers.__getitem__)),
        roots=tuple(number[root] for root in graph.roots),
        light=frozenset(index for node, index in number.items() if not saves[type(node)] and edges[index]),
    )


def _all_on_the_cpu(graph: Graph) -> bool:
    if not torch.accelerator.is_available():
        return True
    return all(meta.device.type == "cpu" for node in graph for meta in node._input_metadata)


def _unpacked_by_python(node: Node, names: Sequence[str]) -> bool:
    """Whether the first tensor that ``node`` saved went through hooks; hooks see all that a node saves, or nothing."""
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed already: the pass itself will say so
            return False
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            data = getattr(one, "data", None)
            if data is not None:
                return not isinstance(data, Tensor) or getattr(one, "unpack_hook", None) is not None
    return False
