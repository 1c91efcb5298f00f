"""CUDA streams: a value may be replayed on another stream than the one that made it.

Autograd runs a backward node on the stream of its forward operator, and that stream has waited for everything the
operator read. So a replay, which runs on the node's stream, may read what is held. What remains to be said to the
allocator is that memory of one stream is in use on another, and to other streams that a replayed value may not be
ready.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Ready(NamedTuple):
    """The moment at which a replayed value is complete, on the stream that computed it."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


def stream_of(device: torch.device) -> int:
    """Return the number of the current stream of ``device``; 0 where there are no streams."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def used_here(tensor: Tensor, stream: int) -> None:
    """Tell the allocator that memory that belongs to ``stream`` is being used on the current one."""
    if tensor.is_cuda and stream != stream_of(tensor.device):
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def ready_now(device: torch.device) -> Ready | None:
    """Mark this moment on the device's current stream."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return Ready(stream, stream.record_event())


def wait_until(ready: Ready | None, tensor: Tensor) -> None:
    """Have the current stream wait for a value that another one computed."""
    if ready is None or not tensor.is_cuda:
        return  # some results of a CUDA operator are on the host, such as an attention kernel's seed
    here = torch.cuda.current_stream(tensor.device)
    if here != ready.stream:
        here.wait_event(ready.event)
        tensor.record_stream(here)
