"""What recording costs: per operator, and over whole steps, against plain PyTorch and its own checkpointing.

Run: python benchmarks/overhead.py [--device cuda]

All variants are interleaved in one run; figures are medians, and ratios are taken within the run.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import scrimp
from scrimp.policy import KeepAll, KeepNone, KeepOps, Online, Planned
from scrimp.testing import live_bytes

aten = torch.ops.aten
MATMULS = {aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention_for_cpu,
           aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention}  # fmt: skip


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that only passes on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def empty_mode_and_identity_hooks() -> Iterator[None]:
    with EmptyMode(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


def small_operators(x: Tensor) -> Tensor:
    for _ in range(100):
        x = (x.sin() * x).tanh().add(1.0)
    return x


def per_operator(repeats: int) -> None:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "empty mode + identity hooks": empty_mode_and_identity_hooks,
        "session(KeepAll())": lambda: scrimp.session(KeepAll()),
        "session(Online, never full)": lambda: scrimp.session(Online(1 << 60)),
        "session(KeepNone())": lambda: scrimp.session(KeepNone()),
    }
    x = torch.randn(8, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(repeats):
        for name, context in contexts.items():
            start = time.perf_counter()
            with context():
                y = small_operators(x)
            times[name].append((time.perf_counter() - start) / 400)
            del y
    base = statistics.median(times["empty mode + identity hooks"])
    table = Table("forward, per operator", "µs", "over empty mode + identity hooks")
    for name, values in times.items():
        median = statistics.median(values)
        table.add_row(name, f"{median * 1e6:.2f}", f"{median / base:.2f}x")
    Console().print(table)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


Variant = Callable[[], Tensor]


def whole_step(device: str, repeats: int) -> None:
    on_gpu = device == "cuda"
    width, layers, batch, length = (2048, 12, 4, 4096) if on_gpu else (256, 6, 4, 256)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers)).to(device, dtype)
    x = torch.randn(batch, length, width, device=device, dtype=dtype)
    variants = ways_to_run(blocks, x)
    peaks = {name: step(blocks, loss, device)[1] for name, loss in variants.items()}
    if not on_gpu:  # tracing takes times by the host's clock
        blocks.zero_grad()
        seen = scrimp.trace(variants["plain"])
        before = sum(part.nbytes for part in seen.resident)
        for name in ("torch selective", "torch checkpoint"):
            plan = scrimp.plan(seen, before + peaks[name])
            variants[f"plan, in the bytes of {name}"] = planned(variants["plain"], Planned(seen, plan))
        peaks = {name: step(blocks, loss, device)[1] for name, loss in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, loss in variants.items():
            times[name].append(step(blocks, loss, device, count=False)[0])
    base = statistics.median(times["plain"])
    table = Table(f"{layers} blocks, d={width}, {batch}x{length} tokens", "ms", "over plain", "peak MiB")
    for name, values in times.items():
        median = statistics.median(values)
        table.add_row(name, f"{median * 1e3:.1f}", f"{(median / base - 1) * 100:+.1f}%", f"{peaks[name] / 2**20:.1f}")
    Console().print(table)


def ways_to_run(blocks: nn.ModuleList, x: Tensor) -> dict[str, Variant]:
    def torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op.overloadpacket in MATMULS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def selective() -> Any:
        return create_selective_checkpoint_contexts(torch_policy)

    def each_block(call: Callable[[nn.Module, Tensor], Tensor]) -> Variant:
        def loss() -> Tensor:
            y = x
            for block in blocks:
                y = call(block, y)
            return y.float().square().mean()

        return loss

    return {
        "plain": each_block(lambda block, y: block(y)),
        "KeepAll": each_block(lambda block, y: scrimp.checkpoint(block, y, policy=KeepAll())),
        "recorded, nothing dropped": each_block(lambda block, y: scrimp.checkpoint(block, y, policy=Online(1 << 60))),
        "torch selective": each_block(lambda block, y: checkpoint(block, y, use_reentrant=False, context_fn=selective)),
        "KeepOps, the same operators": each_block(
            lambda block, y: scrimp.checkpoint(block, y, policy=KeepOps(MATMULS))
        ),
        "torch checkpoint": each_block(lambda block, y: checkpoint(block, y, use_reentrant=False)),
        "KeepNone": each_block(lambda block, y: scrimp.checkpoint(block, y)),
    }


def planned(plain: Variant, policy: Planned) -> Variant:
    def loss() -> Tensor:
        with scrimp.session(policy):
            return plain()

    return loss


def step(blocks: nn.ModuleList, loss: Variant, device: str, count: bool = True) -> tuple[float, int]:
    """Return seconds and peak bytes of a step; counting bytes on the CPU costs time."""
    blocks.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with live_bytes() if count and device == "cpu" else nullcontext() as counted:
        loss().backward()
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated()
    return time.perf_counter() - start, counted.peak if counted is not None else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, medians of {arguments.repeats}")
    per_operator(arguments.repeats)
    whole_step(arguments.device, arguments.repeats)
