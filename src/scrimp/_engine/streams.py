"""Branches on CUDA streams.

Backward needs nothing of ours: PyTorch runs every node on the stream of its forward, with the waits it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Each has a cuBLAS workspace of its own (32 MiB on Hopper): not one for every branch.
AUTO_STREAMS = 4


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same streams in every call: new ones would take new workspaces, and leave the memory of the old unused."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def run_on_streams(branches: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], streams: int) -> list[Any]:
    """Run each branch on one of ``streams`` side streams of the device that the first CUDA input is on."""
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.is_cuda]
    device = tensors[0].device
    if min(streams, len(branches)) < 2 or not _can_have_streams():
        return [branch(*inputs) for branch in branches]
    outer = torch.cuda.current_stream(device)
    count = min(streams, len(branches))
    sides = [_side_stream(device, number) for number in range(count)]
    for side in sides:
        side.wait_stream(outer)
        for value in (tensor for tensor in tensors if tensor.device == device):
            # Backward may free an input on the host while the side stream has yet to read it.
            _in_use(value, side)
    current = torch.cuda.current_device()
    try:
        results = []
        for index, branch in enumerate(branches):
            # Entering a stream makes its device the current one; branches shall find the caller's.
            with torch.cuda.stream(sides[index % len(sides)]), torch.cuda.device(current):
                results.append(branch(*inputs))
    finally:
        for side in sides:
            outer.wait_stream(side)
    for value in tree_leaves(results):
        if isinstance(value, Tensor) and value.device == device:
            _in_use(value, outer)
    return results


def _can_have_streams() -> bool:
    """Whether nothing is in force that records or transforms operators without their streams."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.cuda.is_current_stream_capturing()
    )


def _in_use(value: Tensor, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing the memory of ``value`` before ``stream`` is done with it."""
    for part in _dense_parts(value):
        part.record_stream(stream)


def _dense_parts(value: Tensor) -> tuple[Tensor, ...]:
    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return (value,)
