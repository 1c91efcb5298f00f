"""Branches on CUDA streams.

Backward needs nothing of ours: PyTorch runs every node on the stream of its forward, with the waits it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def run_on_streams(branches: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], streams: int) -> list[Any]:
    """Run each branch on one of ``streams`` side streams of the device that the first CUDA input is on."""
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.is_cuda]
    device = tensors[0].device
    if streams < 2 or len(branches) < 2 or torch.cuda.is_current_stream_capturing():
        return [branch(*inputs) for branch in branches]
    outer = torch.cuda.current_stream(device)
    count = min(streams, len(branches))
    sides = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
    for side in sides:
        side.wait_stream(outer)
        for value in tensors:
            # Backward may free an input on the host while the side stream has yet to read it.
            value.record_stream(side)
    try:
        results = []
        for index, branch in enumerate(branches):
            with torch.cuda.stream(sides[index % len(sides)]):
                results.append(branch(*inputs))
    finally:
        for side in sides:
            outer.wait_stream(side)
    for value in tree_leaves(results):
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(outer)
    return results
