"""The graph that PyTorch recorded, as Python sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root: TypeAlias = Tensor | GradientEdge
Edge: TypeAlias = tuple[Node, int]

# How a line of a traceback begins that is PyTorch's own.
_INSIDE_TORCH = f'File "{Path(torch.__file__).parent}{os.sep}'


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes that backward can reach, each with its outgoing edges in PyTorch's own sequence.

    Holding a ``Graph`` keeps its nodes alive, and with them what they saved: drop it when backward is done.
    """

    roots: tuple[Node, ...]
    edges: dict[Node, tuple[Edge, ...]]
    arriving: dict[Node, int]
    """For every node, how many gradients must have arrived before it can run."""

    def __len__(self) -> int:
        return len(self.edges)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.edges)

    @property
    def leaves(self) -> list[tuple[Node, Tensor]]:
        """The nodes that accumulate into ``.grad``, each with its tensor."""
        return [
            (node, leaf)
            for node, edges in self.edges.items()
            if not edges and (leaf := getattr(node, "variable", None)) is not None
        ]


def record_graph(roots: Sequence[Root]) -> Graph:
    """Walk from the roots to the leaves, visiting every node once."""
    starts = tuple(dict.fromkeys(node for root in roots if (node := node_of(root)) is not None))
    edges: dict[Node, tuple[Edge, ...]] = {}
    arriving = dict.fromkeys(starts, 0)
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        following: Any = node.next_functions
        whole = True
        for after, _ in following:
            if after in arriving:
                arriving[after] += 1
            elif after is None:
                whole = False
            else:
                arriving[after] = 1
                waiting.append(after)
        # Every node passes here, so the engine's own tuple is kept where it can be.
        edges[node] = following if whole else tuple([edge for edge in following if edge[0] is not None])
    return Graph(starts, edges, arriving)


def node_of(root: Root) -> Node | None:
    """The node that receives the gradient of ``root``, or ``None`` when it needs no gradient."""
    if isinstance(root, GradientEdge):
        return root.node
    if root.grad_fn is not None:
        return root.grad_fn
    return get_gradient_edge(root).node if root.requires_grad else None


def forward_line(node: Node) -> str | None:
    """Where in the forward pass ``node`` was made: known for what ran under anomaly detection.

    That is the innermost line of the user's, not one of PyTorch that it called.
    """
    metadata: Any = node.metadata
    trace: list[str] = metadata.get("traceback_") or []
    outside = [frame for frame in trace if not frame.lstrip().startswith(_INSIDE_TORCH)]
    return (outside or trace)[-1].strip() if trace else None


def shape_at(node: Node, slot: int) -> tuple[int, ...] | None:
    """The shape of the forward output ``slot`` that ``node`` differentiates; ``None`` for a nested tensor."""
    metadata = node._input_metadata[slot]
    return None if metadata.is_nested_tensor else tuple(metadata.shape)


def shape_text(node: Node, slot: int) -> str:
    """The same, for messages."""
    shape = shape_at(node, slot)
    return "nested" if shape is None else str(shape)


def shapes_of(node: Node) -> str:
    """The shapes of all forward outputs that ``node`` differentiates, for messages."""
    return ", ".join(shape_text(node, slot) for slot in range(len(node._input_metadata)))


def describe(node: Node) -> str:
    """Name, shapes and, when known, the forward line of ``node``, for messages."""
    line = forward_line(node)
    made = f", made at {line}" if line else ""
    return f"{node.name()} (of output shape {shapes_of(node)}{made})"
