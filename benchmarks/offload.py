"""What it costs to have activations wait in host memory: a Llama-like step, plain, offloaded by torch, and by scrimp.

Run: python benchmarks/offload.py [--repeats 5]

With a CUDA device: 12 layers, d=2048, 4x4096 tokens, bf16. Without one, a toy that only shows that the program works.
Peaks are those of the allocator above what stands before the step, which parameters and gradients do. Times are medians
of steps that are taken in turn.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp._budget import format_bytes
from scrimp.policy import DROP, Answer, Candidate, KeepNone, KeepOps, Online, Policy, StoreInputs
from scrimp.store import Host
from scrimp.testing import live_bytes

aten = torch.ops.aten
GIB = 1 << 30
MATMULS = {
    aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of the step."""

    width: int
    hidden: int
    layers: int
    batch: int
    length: int
    dtype: torch.dtype


SIZES = {
    "cuda": Size(2048, 5504, 12, 4, 4096, torch.bfloat16),
    "cpu": Size(128, 344, 4, 2, 64, torch.float32),
}


class RMSNorm(nn.Module):
    """In single precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Block(nn.Module):
    """Attention with rotary positions, and a gated perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.width // 64
        self.norm1, self.norm2 = RMSNorm(size.width), RMSNorm(size.width)
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        h = self.norm1(x)
        q, k, v = (part(h).view(*x.shape[:2], self.heads, 64).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(attended)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Step:
    """A step that can be taken in many ways."""

    def __init__(self, device: str) -> None:
        size = SIZES[device]
        torch.manual_seed(0)
        self.device = device
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers)).to(device, size.dtype)
        self.x = torch.randn(size.batch, size.length, size.width, device=device, dtype=size.dtype)
        angles = torch.outer(torch.arange(size.length), 1e4 ** -(torch.arange(0, 64, 2) / 64)).repeat(1, 2)
        self.cos, self.sin = (f(angles).to(device, size.dtype) for f in (torch.cos, torch.sin))

    def loss(self, call: Callable[..., Tensor] = lambda block, *args: block(*args)) -> Tensor:
        """Go forward, calling each block in some way."""
        y = self.x
        for block in self.blocks:
            y = call(block, y, self.cos, self.sin)
        return y.float().square().mean()


class Spread(Policy):
    """Store a fraction of what another policy keeps, evenly over the step, except for what is needed first."""

    def __init__(self, base: Policy, host: Host, fraction: float, total: int) -> None:
        self._base, self._host, self._fraction, self._total = base, host, fraction, total
        self._seen = 0
        self._owed = 0.0

    def decide(self, value: Candidate) -> Answer:
        """Pay what is owed."""
        answer = self._base.decide(value)
        if answer is DROP:
            return DROP
        self._seen += value.nbytes
        if value.nbytes < self._total / 1000 or self._seen > 0.95 * self._total:
            return answer
        self._owed += self._fraction * value.nbytes
        if self._owed < value.nbytes / 2:
            return answer
        self._owed -= value.nbytes
        return self._host


@dataclass
class Way:
    """A way to take the step, and what was measured of it."""

    run: Callable[[], Tensor]
    host: Host | None = None
    repeats: int | None = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    bytes_out: int = 0
    waited: float = 0.0
    failed: str = ""


def take(step: Step, way: Way, count: bool) -> None:
    """Take the step once; `count` peaks, or else time it."""
    for parameter in step.blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    before = way.host.statistics if way.host else None
    on_gpu = step.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        standing = torch.cuda.memory_allocated()
    counting: AbstractContextManager[Any] = live_bytes() if count and not on_gpu else nullcontext()
    start = time.perf_counter()
    with counting as counted:
        way.run().backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if count:
        way.peak = torch.cuda.max_memory_allocated() - standing if on_gpu else counted.peak
    else:
        way.seconds.append(seconds)
    if way.host and before:
        after = way.host.statistics
        way.bytes_out = after.bytes_out - before.bytes_out
        way.waited = after.waited_seconds - before.waited_seconds


def ways(step: Step, amounts: list[float]) -> dict[str, Way]:
    def save_on_cpu() -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=step.device == "cuda"):
            return step.loss()

    found = {
        "plain": Way(step.loss),
        "torch checkpoint, every block": Way(lambda: step.loss(lambda *args: checkpoint(*args, use_reentrant=False))),
        "torch save_on_cpu": Way(save_on_cpu, repeats=1),
    }
    bases: dict[str, Policy] = {"keep all": Online(1 << 62), "keep matmuls, attention": KeepOps(MATMULS)}
    for name, base in bases.items():
        total = kept_by(step, base)
        for amount in amounts:
            host = Host()
            found[f"{name}, {amount:.0%} of it stored"] = Way(spread(step, base, host, amount, total), host)
    host = Host()
    found["KeepNone, every block"] = Way(lambda: step.loss(scrimp.checkpoint))
    policy = StoreInputs(host)
    found["StoreInputs, every block"] = Way(
        lambda: step.loss(lambda *args: scrimp.checkpoint(*args, policy=policy)), host
    )
    return found


def kept_by(step: Step, base: Policy) -> int:
    with scrimp.session(base) as session:
        loss = step.loss()
    kept = session.statistics.kept.bytes
    del loss
    return kept


def spread(step: Step, base: Policy, host: Host, amount: float, total: int) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with scrimp.session(Spread(base, host, amount, total)):
            return step.loss()

    return run


def measure(step: Step, found: dict[str, Way], repeats: int) -> None:
    for name, way in found.items():
        try:
            take(step, way, count=False)  # the first step of each allocates, and is not counted
            way.seconds.clear()
            take(step, way, count=True)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            way.failed = str(error).splitlines()[0][:60]
            print(f"{name} failed: {way.failed}")
    for number in range(repeats):
        for way in found.values():
            if not way.failed and number < (way.repeats or repeats):
                take(step, way, count=False)


def check(step: Step, host: Host) -> None:
    """The loss of a step whose values are stored is the plain one, to the bit."""
    with scrimp.session(Spread(KeepNone(), host, 0.0, 1)):
        ours = step.loss()
    with torch.no_grad():
        plain = step.loss()
    assert torch.equal(ours.detach(), plain)


def show(found: dict[str, Way]) -> None:
    base = statistics.median(found["plain"].seconds)
    table = Table("way", "peak", "ms", "over plain", "out and in", "waited, ms", "GiB/s out", "GiB/s in")
    for name, way in found.items():
        if way.failed:
            table.add_row(name, way.failed)
            continue
        median = statistics.median(way.seconds)
        row = [name, format_bytes(way.peak), f"{median * 1e3:.1f}", f"{(median / base - 1) * 100:+.1f}%"]
        if way.host:
            total = way.host.statistics
            bandwidths = [f"{one / GIB:.1f}" for one in (total.out_bandwidth, total.in_bandwidth)]
            row += [format_bytes(way.bytes_out), f"{way.waited * 1e3:.1f}", *bandwidths]
        table.add_row(*row)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--amounts", type=float, nargs="*", default=[0.0, 0.05, 0.1, 0.15, 0.25])
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {name}, medians of {arguments.repeats}; {SIZES[device]}")
    step = Step(device)
    check(step, Host())
    found = ways(step, arguments.amounts)
    measure(step, found, arguments.repeats)
    show(found)


if __name__ == "__main__":
    main()
