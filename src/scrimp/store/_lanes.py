"""The way between a device and the host: on CUDA one stream out and one back, so that copies run beside the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from scrimp._streams import stream_of
from scrimp.store._account import Span
from scrimp.store._memory import Memory


class Landing(NamedTuple):
    """A copy back to the device, on its way or there."""

    tensor: Tensor
    span: Span
    came: torch.cuda.Stream | None
    """The stream that it comes on."""
    owner: torch.cuda.Stream | None
    """The stream that its memory belongs to."""


class _Streams(NamedTuple):
    out: torch.cuda.Stream
    back: torch.cuda.Stream


@contextmanager
def unseen() -> Iterator[None]:
    """Run operators that are nobody's business: host memory is made and filled unseen by dispatch modes."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        yield


class Lanes:
    """The streams of one store, by device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, _Streams] = {}

    def leave(self, content: Tensor, memory: Memory) -> Span:
        """Copy bytes off their device; on CUDA this only begins, and ends at the event that the span ends with."""
        if not content.is_cuda:
            start = time.perf_counter()
            with unseen():
                memory.fill(content)
            return time.perf_counter() - start
        lane = self._of(content.device).out
        lane.wait_event(torch.cuda.current_stream(content.device).record_event())
        for event in memory.free_after:
            lane.wait_event(event)
        with torch.cuda.stream(lane), unseen():
            begin = _now(lane)
            memory.fill(content)
            end = memory.busy = _now(lane)
        return begin, end

    def left(self, span: Span, content: Tensor, owner: int) -> Span:
        """Have the current stream wait until a copy has left, so that ``content`` may go; its stream is ``owner``.

        Returns:
            From when until when it may have to wait.
        """
        waited = wait(span, content.device)
        if content.is_cuda and stream_of(content.device) != owner:
            # Memory goes back to its own stream, which does not wait: then the allocator has to.
            content.record_stream(self._of(content.device).out)
        return waited

    def land(self, memory: Memory, nbytes: int, device: torch.device) -> Landing:
        """Copy bytes back, to new memory of the device; on CUDA this only begins, as soon as they have left."""
        start = time.perf_counter()
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type != "cuda":
            with unseen():
                memory.pour(tensor)
            return Landing(tensor, time.perf_counter() - start, None, None)
        here = torch.cuda.current_stream(device)
        lane = self._of(device).back
        lane.wait_event(here.record_event())
        if memory.busy is not None:
            lane.wait_event(memory.busy)
        with torch.cuda.stream(lane), unseen():
            begin = _now(lane)
            memory.pour(tensor)
            end = memory.busy = _now(lane)
        return Landing(tensor, (begin, end), lane, here)

    def _of(self, device: torch.device) -> _Streams:
        if device not in self._streams:
            self._streams[device] = _Streams(_stream(device), _stream(device))
        return self._streams[device]


def wait(span: Span, device: torch.device) -> Span:
    """Have the current stream wait for the end of a copy; return from when until when it may have to."""
    if isinstance(span, float):
        return 0.0
    here = torch.cuda.current_stream(device)
    now = _now(here)
    here.wait_event(span[1])
    return now, span[1]


def take(landing: Landing) -> Span:
    """Have the current stream wait for what lands, and the memory wait for the current stream when it goes."""
    waited = wait(landing.span, landing.tensor.device)
    if landing.owner is not None:
        here = torch.cuda.current_stream(landing.tensor.device)
        if here != landing.owner:
            landing.tensor.record_stream(here)
    return waited


def leave_lying(landing: Landing) -> None:
    """Say that nobody waits for what lands: its memory must not be used again before it has landed."""
    if landing.came is not None:
        landing.tensor.record_stream(landing.came)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _now(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
