"""Measure ``scrimp.backward`` and ``scrimp.parallel`` against PyTorch.

    python benchmarks/backward.py [nodes] [models] [memory] [workers] [parallel] [--cuda]

Every comparison is interleaved (A B A B ...) in one process and reported as the ratio of medians; single
times are the medians themselves. Threads inside operators: one, unless a line says otherwise.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import scrimp
from branches import Claim, closing, machine, on_the_cpu, on_the_gpu, plain_graphs
from scrimp.testing import LiveBytes, live_bytes

Step = Callable[[], Tensor]
Backward = Callable[[Tensor], object]

WAYS: dict[str, Backward] = {
    "loss.backward()": lambda loss: loss.backward(),
    'order="torch"': lambda loss: scrimp.backward(loss),
    'order="depth-first"': lambda loss: scrimp.backward(loss, order="depth-first"),
    'order="memory"': lambda loss: scrimp.backward(loss, order="memory"),
    "Profile": lambda loss: scrimp.backward(loss, observer=scrimp.Profile()),
    "on_leaf_grad_ready": lambda loss: scrimp.backward(loss, on_leaf_grad_ready=lambda leaf, gradient: None),
}


def medians(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run all in turn, ``rounds`` times after one to warm up; the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            taken = step()
            if round_:
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def backward_seconds(step: Step, run: Backward) -> float:
    """Processor seconds of the backward pass alone: of one thread, and whatever else the machine does meanwhile."""
    loss = step()
    gc.collect(0)
    start = time.process_time()
    run(loss)
    return time.process_time() - start


def chain(length: int) -> Step:
    """Many small nodes."""
    x = torch.ones(8, requires_grad=True)

    def step() -> Tensor:
        y = x
        for _ in range(length):
            y = y * 1.0
        return y.sum()

    return step


def model_steps() -> dict[str, Step]:
    """Models of several shapes; sizes that a 2-core CPU runs in tens of milliseconds."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    transformer = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    tokens = torch.randn(2, 128, 256)
    mlp = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)])
    rows = torch.randn(64, 512)
    convolutions = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(8)]
    )
    images = torch.randn(4, 32, 32, 32)
    recurrent = nn.LSTMCell(64, 64)

    def lstm() -> Tensor:
        state = (torch.zeros(8, 64), torch.zeros(8, 64))
        for _ in range(100):
            state = recurrent(state[0], state)
        return state[0].sum()

    return {
        "transformer, 4 layers, d=256": lambda: transformer(tokens).square().mean(),
        "MLP, 12 layers, d=512": lambda: mlp(rows).square().mean(),
        "8 convolutions with batch norm": lambda: convolutions(images).square().mean(),
        "LSTM cell, 100 steps": lstm,
    }


def nodes(console: Console) -> list[Claim]:
    length = 5000
    step = chain(length)
    found = medians({name: lambda run=run: backward_seconds(step, run) for name, run in WAYS.items()}, 21)
    plain = found["loss.backward()"]
    table = Table("way", "µs a node", "over plain, µs a node", title=f"a chain of {length} nodes of 8 elements")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds / length * 1e6:.2f}", f"{(seconds - plain) / length * 1e6:+.2f}")
    console.print(table)
    over = {way: (found[way] - plain) / length * 1e6 for way in ('order="torch"', 'order="depth-first"')}
    return [Claim(f"{way}, µs a node over plain", "≤ 2", f"{over[way]:.2f}", over[way] <= 2) for way in over]


def models(console: Console) -> list[Claim]:
    table = Table("model", "plain, ms", *list(WAYS)[1:], title="backward: time over loss.backward()")
    worst = dict.fromkeys(('order="torch"', 'order="depth-first"'), 0.0)
    for name, step in model_steps().items():
        found = medians({way: lambda run=run, s=step: backward_seconds(s, run) for way, run in WAYS.items()}, 15)
        plain = found["loss.backward()"]
        ratios = [f"{found[way] / plain:.3f}" for way in list(WAYS)[1:]]
        table.add_row(name, f"{plain * 1e3:.1f}", *ratios)
        worst = {way: max(ratio, found[way] / plain) for way, ratio in worst.items()}
    console.print(table)
    return [Claim(f"{way}, worst model over plain", "≤ 1.03", f"{worst[way]:.3f}", worst[way] <= 1.03) for way in worst]


def heads(in_sweeps: bool) -> Step:
    """Sixteen heads over one trunk, masked: a graph where the order of branches matters."""
    torch.manual_seed(0)
    x = torch.randn(256, 64, requires_grad=True)
    weights = [torch.randn(64, 1024, requires_grad=True) for _ in range(16)]
    mask = torch.randn(256, 1024)

    def step() -> Tensor:
        if in_sweeps:
            wide = [x @ weight for weight in weights]
            masked = [value * mask for value in wide]
            del wide
            return sum(value.sum() for value in masked)
        return sum(((x @ weight) * mask).sum() for weight in weights)

    return step


class Highest(TorchDispatchMode):
    """The most bytes that were alive after an operator of its block, by a count that began earlier."""

    def __init__(self, count: LiveBytes) -> None:
        super().__init__()
        self.count, self.peak = count, count.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.count.now)
        return result


def peak(step: Step, run: Backward) -> int:
    """Live bytes at the worst moment of backward, of what forward and backward made."""
    gc.collect()
    with live_bytes() as count:
        loss = step()
        with Highest(count) as highest:
            run(loss)
    return highest.peak


def memory(console: Console) -> list[Claim]:
    steps = model_steps() | {"16 heads, one by one": heads(False), "16 heads, in sweeps": heads(True)}
    ways = {name: WAYS[name] for name in ("loss.backward()", 'order="depth-first"', 'order="memory"')}
    table = Table("step", *[f"{name}, MB" for name in ways], "memory / plain", title="peak of backward, live bytes")
    worst = 0.0
    for name, step in steps.items():
        for run in ways.values():  # once unmeasured, so that .grad exists everywhere
            run(step())
        peaks = [peak(step, run) for run in ways.values()]
        worst = max(worst, peaks[-1] / peaks[0])
        table.add_row(name, *[f"{size / 1e6:.2f}" for size in peaks], f"{peaks[-1] / peaks[0]:.3f}")
    console.print(table)
    return [Claim('order="memory", worst peak over plain', "≤ 1.01", f"{worst:.3f}", worst <= 1.01)]


PARTS: dict[str, Callable[[Console], list[Claim]]] = {
    "nodes": nodes,
    "models": models,
    "memory": memory,
    "workers": lambda console: plain_graphs(console, model_steps()),
    "parallel": on_the_cpu,
    "cuda": on_the_gpu,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; all that the CPU can, if empty"
    )
    parser.add_argument("--cuda", action="store_true", help="measure branches on the GPU as well")
    arguments = parser.parse_args()
    console = Console(width=180)
    warnings.simplefilter("ignore", scrimp.errors.StackableBranchesWarning)
    cores = len(os.sched_getaffinity(0))
    console.print(machine())
    claims: list[Claim] = []
    for name in arguments.parts or [part for part in PARTS if part != "cuda" or arguments.cuda]:
        start = time.perf_counter()
        torch.set_num_threads(cores if name in ("workers", "parallel") else 1)
        claims += PARTS[name](console)
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
    closing(console, claims)


if __name__ == "__main__":
    main()
