"""What a device holds and how long it takes: bytes in use, and marks on its clock."""

from __future__ import annotations

import abc
import functools
import os
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scrimp._live import LiveStorages, rounded
from scrimp._optimizers import state_of
from scrimp._trace import Resident

_CYCLES = 400_000  # about 0.2 milliseconds: the host launches an operator in less
_CYCLES_AT_FIRST = 10_000_000  # about 5 milliseconds: it has to load the kernels first

CAPTURED = "captured from outside"
"""The name of what a step used that nobody had told of before."""


class Meter(abc.ABC):
    """Reads one device."""

    device: torch.device
    block: int
    """The allocator hands out multiples of this many bytes."""
    is_behind = False
    """Whether it runs behind the host."""

    @property
    def plays(self) -> torch.device:
        """The device whose kernels are meant: its own, where it does not stand for another."""
        return self.device

    @abc.abstractmethod
    def level(self) -> int:
        """Return the bytes in use now."""

    @abc.abstractmethod
    def most(self) -> int:
        """Return the most bytes that were in use since the step began, as far as they are counted."""

    @abc.abstractmethod
    def requested(self) -> int:
        """Return how many bytes were ever asked for; 0 where nobody counts that."""

    @abc.abstractmethod
    def in_pieces(self) -> int:
        """Return how many free bytes the allocator holds on to, since other memory lies between them."""

    @abc.abstractmethod
    def made(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage that an operator made."""

    @abc.abstractmethod
    def found(self, nbytes: int) -> None:
        """Take note of bytes that were there before the step, and not known until it used them."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Mark this moment on the device's clock."""

    @abc.abstractmethod
    def keep_busy(self, at_first: bool = False) -> None:
        """Give the device something to do while the host prepares what is going to be timed, so that it never idles.

        Args:
            at_first: whether it prepares this for the first time.
        """

    @abc.abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until all marks have been passed."""


@final
class HostMeter(Meter):
    """Counts storages: those that were there before, and those that operators made since."""

    block = 1

    def __init__(self, resident: int) -> None:
        self.device = torch.device("cpu")
        self._resident = resident
        self._live = LiveStorages()

    def level(self) -> int:
        """Return the bytes in use now."""
        return self._resident + self._live.now

    def most(self) -> int:
        """Return the most bytes of storages."""
        return self._resident + self._live.peak

    def requested(self) -> int:
        """Return 0: what an operator uses within itself is not seen."""
        return 0

    def in_pieces(self) -> int:
        """Return 0: the host's memory need not be in one piece."""
        return 0

    def made(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it dies."""
        self._live.add(storage)

    def found(self, nbytes: int) -> None:
        """Count them."""
        self._resident += nbytes

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def keep_busy(self, at_first: bool = False) -> None:
        """Do nothing: host and device are one."""

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def settle(self) -> None:
        """Do nothing: the host's marks have passed when they are made."""


@final
class CudaMeter(Meter):
    """Asks PyTorch's allocator, and marks moments on the stream."""

    block = 512
    is_behind = True

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def level(self) -> int:
        """Return the allocated bytes."""
        return self._stat("current")

    def most(self) -> int:
        """Return the allocator's peak, which it counts from when the program last reset it."""
        return self._stat("peak")

    def requested(self) -> int:
        """Return how many bytes were ever allocated."""
        return self._stat("allocated")

    def in_pieces(self) -> int:
        """Return the reserved bytes that are not in use; after a failure, those that could not be given back."""
        return torch.cuda.memory_reserved(self.device) - self.level()

    def _stat(self, name: str) -> int:
        return int(torch._C._cuda_memoryStats(self.device.index)["allocated_bytes"]["all"][name])

    def made(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the allocator knows."""

    def found(self, nbytes: int) -> None:
        """Do nothing: the allocator knows."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def keep_busy(self, at_first: bool = False) -> None:
        """Wait on the device, longer than it takes the host to launch an operator."""
        torch.cuda._sleep(_CYCLES_AT_FIRST if at_first else _CYCLES)  # type: ignore[no-untyped-call]

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        return max(float(start.elapsed_time(end)) - _between_marks(self.device.index), 0.0) / 1000

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


@functools.cache
def _between_marks(index: int) -> float:
    """Milliseconds that a GPU takes from one event to the next with nothing between them."""
    meter = CudaMeter(torch.device("cuda", index))
    meter.keep_busy()
    marks = [meter.mark() for _ in range(17)]
    meter.settle()
    return median(float(one.elapsed_time(other)) for one, other in pairwise(marks))


def meter_for(device: torch.device, resident: int) -> Meter:
    """Return a meter for a device that holds ``resident`` bytes now."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(resident)


def capacity_of(device: torch.device) -> int | None:
    """Return how many bytes a device has, where that can be asked."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def prefer_expandable_segments() -> None:
    """Have PyTorch's allocator map memory in pieces, unless the program has chosen its settings itself.

    Otherwise a step that fits by its bytes may fail for want of so many bytes in a row.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its successor does not reach the CUDA allocator in 2.11
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def claim_workspaces(device: torch.device) -> None:
    """Have the libraries of a GPU allocate what they keep for good, in this thread and in that of backward.

    Otherwise the first products of a step would, within them, where no room has been made for it.
    """
    if device.type != "cuda":
        return
    with torch.enable_grad(), torch._C._DisableTorchDispatch(), saved_tensors_hooks(_as_it_is, _as_it_is):
        one = torch.ones(8, 8, device=device, requires_grad=True)
        with suppress(RuntimeError):  # where products are refused, by deterministic algorithms say, a step has none
            torch.autograd.grad(torch.addmm(one, one, one).sum(), one)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Before:
    """What is on a device before a step.

    Attributes:
        parts: by name, each storage once.
        addresses: of the storages that are counted there one by one.
    """

    parts: tuple[Resident, ...]
    addresses: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def look_before(device: torch.device, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> Before:
    """Say what a device holds now that belongs to a step of these modules.

    On a GPU that is all that the allocator has given out. On the CPU, where other things may live that have nothing to
    do with the step, it is the modules' parameters, buffers, gradients, optimizer state and inputs.
    """
    unit = 512 if device.type == "cuda" else 1
    seen: set[int] = set()

    def total(tensors: Iterable[Tensor | None]) -> int:
        count = 0
        for tensor in tensors:
            if tensor is not None and tensor.device == device and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    count += rounded(storage.nbytes(), unit)
        return count

    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    parts = {
        "parameters": total(parameters),
        "buffers": total(buffer for module in modules for buffer in module.buffers()),
        "gradients from before": total(parameter.grad for parameter in parameters),
        "inputs": total(inputs),
    }
    if parameters:
        parts["optimizer state"] = total(state_of({id(parameter) for parameter in parameters}))
    if device.type == "cuda":
        parts["other allocations"] = max(CudaMeter(device).level() - sum(parts.values()), 0)
    return Before(tuple(Resident(name, nbytes) for name, nbytes in parts.items() if nbytes), frozenset(seen))
