"""Machines as data: how long an operator takes on hardware that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ._budget import format_bytes
from .errors import TraceError

__all__ = ["MACHINES", "Machine", "machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """A device by its roofline: an operator takes the longer of its arithmetic and its memory traffic.

    Attributes:
        name: what it is called.
        memory: bytes that it has.
        bandwidth: bytes per second that its memory delivers in practice.
        flops: floating-point operations per second that matrix products reach in practice, by the bits of an element.
        launch: seconds that the smallest operator takes.
        block: its allocator hands out multiples of this many bytes.
        link: bytes per second to the memory of its host, and as many back at the same time; 0 for the host itself.

    Example:
        >>> gpu = MACHINES["H200"]
        >>> f"{gpu.seconds(flops=1e12, bits=16, nbytes=0) * 1e3:.1f} ms"
        '1.6 ms'
    """

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[int, float] = field(hash=False)
    launch: float = 3e-6
    block: int = 512
    link: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def seconds(self, flops: float, bits: int, nbytes: int) -> float:
        """Estimate the time of an operator."""
        rate = self.flops.get(bits, min(self.flops.values()))
        return self.launch + max(flops / rate, nbytes / self.bandwidth)

    def __str__(self) -> str:
        return f"{self.name}, {format_bytes(self.memory)}"


# What data sheets promise, times what large operators reach of it: about two thirds of the arithmetic (dense matrix
# products) and 85% of the bandwidth.
# PCIe delivers about 85% of a lane's rate to pinned memory: 51 GiB/s were measured on an H200.
_ARITHMETIC, _TRAFFIC = 0.65, 0.85
_PCIE = {3: 13.5e9, 4: 27e9, 5: 54.8e9}  # by generation, 16 lanes


def _gpu(name: str, memory: int, bandwidth: float, half: float, single: float, pcie: int) -> Machine:
    rates = {8: half, 16: half, 32: single, 64: single / 2}
    rates = {bits: rate * 1e12 * _ARITHMETIC for bits, rate in rates.items()}
    return Machine(name, memory << 30, bandwidth * 1e12 * _TRAFFIC, rates, link=_PCIE[pcie])


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        one.name: one
        for one in (
            _gpu("H200", 139, 4.8, 989, 67, pcie=5),
            _gpu("H100", 79, 3.35, 989, 67, pcie=5),
            _gpu("A100", 79, 2.04, 312, 19.5, pcie=4),
            _gpu("A100-40GB", 39, 1.56, 312, 19.5, pcie=4),
            _gpu("L40S", 44, 0.86, 362, 91.6, pcie=4),
            _gpu("RTX-4090", 23, 1.01, 165, 82.6, pcie=4),
            _gpu("T4", 15, 0.32, 65, 8.1, pcie=3),
            Machine("CPU", 64 << 30, 2e10, {16: 5e10, 32: 1e11, 64: 5e10}, launch=2e-6, block=1),
        )
    }
)
"""By name; all but the CPU with dense tensor-core rates for 16 bits and plain ones for 32."""


def machine(name: str) -> Machine:
    """The machine of that name, in any case.

    Raises:
        TraceError: when it is unknown.
    """
    found = {known.lower(): one for known, one in MACHINES.items()}.get(name.lower())
    if found is None:
        raise TraceError(f"need one of the machines {', '.join(MACHINES)}; have {name!r}")
    return found
