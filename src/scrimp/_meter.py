"""What a device holds and how long it takes: bytes in use, and marks on its clock."""

from __future__ import annotations

import abc
import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from scrimp._live import LiveStorages, rounded
from scrimp._trace import Resident


class Meter(abc.ABC):
    """Reads one device."""

    device: torch.device
    block: int
    """The allocator hands out multiples of this many bytes."""

    @abc.abstractmethod
    def level(self) -> int:
        """Return the bytes in use now."""

    @abc.abstractmethod
    def requested(self) -> int:
        """Return how many bytes were ever asked for; 0 where nobody counts that."""

    @abc.abstractmethod
    def made(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage that an operator made."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Mark this moment on the device's clock."""

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

    def requested(self) -> int:
        """Return 0: what an operator uses within itself is not seen."""
        return 0

    def made(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it dies."""
        self._live.add(storage)

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def settle(self) -> None:
        """Do nothing: the host's marks have passed when they are made."""


@final
class CudaMeter(Meter):
    """Asks PyTorch's allocator, and marks moments on the stream."""

    block = 512

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def level(self) -> int:
        """Return the allocated bytes."""
        return self._stat("current")

    def requested(self) -> int:
        """Return how many bytes were ever allocated."""
        return self._stat("allocated")

    def _stat(self, name: str) -> int:
        return int(torch._C._cuda_memoryStats(self.device.index)["allocated_bytes"]["all"][name])

    def made(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: the allocator knows."""

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def meter_for(device: torch.device, resident: int) -> Meter:
    """Return a meter for a device that holds ``resident`` bytes now."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter(resident)


def capacity_of(device: torch.device) -> int | None:
    """Return how many bytes a device has, where that can be asked."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def resident_on(device: torch.device, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> tuple[Resident, ...]:
    """Say what is on a device now, by name; each storage counts once.

    On a GPU the allocator knows the sum. On the CPU it is the storages of all tensors that Python can reach.
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
    if device.type == "cuda":
        known = sum(parts.values())
        other = max(CudaMeter(device).level() - known, 0)
    else:
        other = total(_tensors_alive())
    parts["optimizer state and whatever else is alive"] = other
    return tuple(Resident(name, nbytes) for name, nbytes in parts.items() if nbytes)


def _tensors_alive() -> Iterator[Tensor]:
    for candidate in gc.get_objects():
        kind = type(candidate)
        if (kind is Tensor or kind is nn.Parameter) and not candidate.is_meta:
            yield candidate
            if candidate.is_leaf and candidate.grad is not None:
                yield candidate.grad
