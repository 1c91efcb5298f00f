"""What recording costs: per operator, and over whole steps, against plain PyTorch and its own checkpointing.

Run: python benchmarks/overhead.py [--cuda]

The step is a small GPT's on the CPU; with --cuda it is a Llama-like's of 12 layers, d=2048, 4x4096 tokens, in bfloat16.
All variants are interleaved in one run; figures are medians, and ratios are taken within the run. Peaks are bytes above
what stands before the step: parameters, gradients and tokens.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import scrimp
from blocks import GPTBlock, LanguageModel, LlamaBlock
from scrimp.policy import KeepAll, KeepNone, KeepOps, Online, Planned, Policy
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


def per_operator(device: str, repeats: int) -> None:
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "empty mode + identity hooks": empty_mode_and_identity_hooks,
        "session(KeepAll())": lambda: scrimp.session(KeepAll()),
        "session(Online, never full)": lambda: scrimp.session(Online(1 << 60)),
        "session(KeepNone())": lambda: scrimp.session(KeepNone()),
    }
    x = torch.randn(8, device=device, requires_grad=True)
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


Variant = Callable[[], Tensor]


def whole_step(on_gpu: bool, repeats: int) -> None:
    device = "cuda" if on_gpu else "cpu"
    width, layers, batch, length, vocabulary = (2048, 12, 4, 4096, 32_000) if on_gpu else (256, 6, 4, 256, 1024)
    block = LlamaBlock if on_gpu else GPTBlock
    with torch.device(device):
        model = LanguageModel(block, width, layers, vocabulary).to(torch.bfloat16 if on_gpu else torch.float32)
        tokens = torch.randint(vocabulary, (batch, length))
    variants = ways_to_run(model, tokens)
    for loss in variants.values():
        step(model, loss, on_gpu)  # makes the gradients, and lets libraries choose their kernels
    peaks = {name: step(model, loss, on_gpu)[1] for name, loss in variants.items()}
    if not on_gpu:  # tracing takes times by the host's clock
        seen = scrimp.trace(variants["plain"])
        before = sum(part.nbytes for part in seen.resident)
        for name in ("torch selective", "torch checkpoint"):
            plan = scrimp.plan(seen, before + peaks[name])
            variants[f"plan, in the bytes of {name}"] = in_session(variants["plain"], Planned(seen, plan))
        peaks = {name: step(model, loss, on_gpu)[1] for name, loss in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, loss in variants.items():
            times[name].append(step(model, loss, on_gpu, count=False)[0])
    base = statistics.median(times["plain"])
    table = Table(f"{layers} layers, d={width}, {batch}x{length} tokens", "ms", "over plain", "peak MiB")
    for name, values in times.items():
        median = statistics.median(values)
        table.add_row(name, f"{median * 1e3:.1f}", f"{(median / base - 1) * 100:+.1f}%", f"{peaks[name] / 2**20:.1f}")
    Console().print(table)


def ways_to_run(model: LanguageModel, tokens: Tensor) -> dict[str, Variant]:
    def torch_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op.overloadpacket in MATMULS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def selective() -> Any:
        return create_selective_checkpoint_contexts(torch_policy)

    def each_block(call: Callable[[nn.Module, Tensor], Tensor]) -> Variant:
        def loss() -> Tensor:
            y = model.embedding(tokens)
            for block in model.blocks:
                y = call(block, y)
            return model.loss(y, tokens)

        return loss

    plain = each_block(lambda block, y: block(y))
    return {
        "plain": plain,
        "KeepAll": in_session(plain, KeepAll()),
        "KeepAll, each block": each_block(lambda block, y: scrimp.checkpoint(block, y, policy=KeepAll())),
        "recorded, nothing dropped": each_block(lambda block, y: scrimp.checkpoint(block, y, policy=Online(1 << 60))),
        "torch selective": each_block(lambda block, y: checkpoint(block, y, use_reentrant=False, context_fn=selective)),
        "KeepOps, the same operators": each_block(
            lambda block, y: scrimp.checkpoint(block, y, policy=KeepOps(MATMULS))
        ),
        "torch checkpoint": each_block(lambda block, y: checkpoint(block, y, use_reentrant=False)),
        "KeepNone": each_block(lambda block, y: scrimp.checkpoint(block, y)),
    }


def in_session(plain: Variant, policy: Policy) -> Variant:
    def loss() -> Tensor:
        with scrimp.session(policy):
            return plain()

    return loss


def step(model: nn.Module, loss: Variant, on_gpu: bool, count: bool = True) -> tuple[float, int]:
    """Return seconds and peak bytes of a step; counting bytes on the CPU costs time."""
    model.zero_grad(set_to_none=False)
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with live_bytes() if count and not on_gpu else nullcontext() as counted:
        loss().backward()
    if on_gpu:
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    return time.perf_counter() - start, counted.peak if counted is not None else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="run the Llama-like step on a GPU")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.cuda else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, medians of {arguments.repeats}")
    per_operator("cuda" if arguments.cuda else "cpu", arguments.repeats)
    whole_step(arguments.cuda, arguments.repeats)
