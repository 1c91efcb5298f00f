"""Measure ``scrimp.backward`` and ``scrimp.parallel`` against PyTorch.

    python benchmarks/backward.py [nodes] [models] [memory] [parallel]

Every comparison is interleaved (A B A B ...) in one process and reported as the ratio of medians; single
times are the medians themselves. Threads inside operators: one, unless a line says otherwise.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import scrimp

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
    """Seconds of the backward pass alone."""
    loss = step()
    gc.collect(0)
    start = time.perf_counter()
    run(loss)
    return time.perf_counter() - start


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


def nodes(console: Console) -> None:
    length = 5000
    step = chain(length)
    found = medians({name: lambda run=run: backward_seconds(step, run) for name, run in WAYS.items()}, 21)
    plain = found["loss.backward()"]
    table = Table("way", "µs a node", "over plain, µs a node", title=f"a chain of {length} nodes of 8 elements")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds / length * 1e6:.2f}", f"{(seconds - plain) / length * 1e6:+.2f}")
    console.print(table)


def models(console: Console) -> None:
    table = Table("model", "plain, ms", *list(WAYS)[1:], title="backward: time over loss.backward()")
    for name, step in model_steps().items():
        found = medians({way: lambda run=run, s=step: backward_seconds(s, run) for way, run in WAYS.items()}, 15)
        plain = found["loss.backward()"]
        ratios = [f"{found[way] / plain:.3f}" for way in list(WAYS)[1:]]
        table.add_row(name, f"{plain * 1e3:.1f}", *ratios)
    console.print(table)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what the operator made."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in self._known:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


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


def peak(step: Step, run: Backward) -> int:
    """Live bytes at the worst moment of backward, of what forward and backward made."""
    gc.collect()
    with LiveBytes() as mode:
        loss = step()
        mode.peak = mode.live
        run(loss)
    return mode.peak


def memory(console: Console) -> None:
    steps = model_steps() | {"16 heads, one by one": heads(False), "16 heads, in sweeps": heads(True)}
    ways = {name: WAYS[name] for name in ("loss.backward()", 'order="depth-first"', 'order="memory"')}
    table = Table("step", *[f"{name}, MB" for name in ways], "memory / plain", title="peak of backward, live bytes")
    for name, step in steps.items():
        for run in ways.values():  # once unmeasured, so that .grad exists everywhere
            run(step())
        peaks = [peak(step, run) for run in ways.values()]
        table.add_row(name, *[f"{size / 1e6:.2f}" for size in peaks], f"{peaks[-1] / peaks[0]:.3f}")
    console.print(table)


def branch_sets() -> dict[str, tuple[list[nn.Module], Tensor]]:
    """Branches of several sizes over one input."""
    torch.manual_seed(0)

    def mlps(count: int, width: int) -> list[nn.Module]:
        return [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()) for _ in range(count)
        ]

    layers = [nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(8)]
    return {
        "16 MLPs, d=64": (mlps(16, 64), torch.randn(64, 64)),
        "16 MLPs, d=512": (mlps(16, 512), torch.randn(64, 512)),
        "4 MLPs, d=1024": (mlps(4, 1024), torch.randn(128, 1024)),
        "8 transformer layers, d=256": (layers, torch.randn(2, 128, 256)),
    }


def step_seconds(run: Callable[..., list[Tensor]], branches: list[nn.Module], x: Tensor, threads: int) -> float:
    """Seconds of a forward and a backward pass."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    sum(result.sum() for result in run(branches, x)).backward()
    return time.perf_counter() - start


def serially(branches: list[nn.Module], x: Tensor) -> list[Tensor]:
    return [branch(x) for branch in branches]


def parallel(console: Console) -> None:
    cores = torch.get_num_threads()
    counts = sorted({count for count in (1, 2, 4, 8, 16) if count <= cores})
    table = Table(
        "branches", "best of serial, ms", "threads in it", "workers × 1 thread", 'workers="auto", 1 thread',
        title="forward and backward: best serial time over parallel's (above 1: parallel is faster)",
    )  # fmt: skip
    for name, (branches, data) in branch_sets().items():
        x = data.requires_grad_()
        ways: dict[str, Callable[[], float]] = {
            f"serial {count}": lambda c=count, b=branches, x=x: step_seconds(serially, b, x, c) for count in counts
        }
        forced = lambda branches, x: scrimp.parallel(branches, x, workers=cores)  # noqa: E731
        ways["forced"] = lambda b=branches, x=x, run=forced: step_seconds(run, b, x, 1)
        ways["auto"] = lambda b=branches, x=x: step_seconds(scrimp.parallel, b, x, 1)
        found = medians(ways, 15)
        best = min((way for way in found if way.startswith("serial")), key=found.__getitem__)
        ratios = [f"{found[best] / found[way]:.2f}" for way in ("forced", "auto")]
        table.add_row(name, f"{found[best] * 1e3:.1f}", best.removeprefix("serial "), *ratios)
    console.print(table)


def main() -> None:
    console = Console(width=160)
    warnings.simplefilter("ignore", scrimp.errors.StackableBranchesWarning)
    cores = torch.get_num_threads()
    console.print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {cores} cores")
    parts = {"nodes": nodes, "models": models, "memory": memory, "parallel": parallel}
    for name in sys.argv[1:] or parts:
        torch.set_num_threads(cores if name == "parallel" else 1)
        parts[name](console)


if __name__ == "__main__":
    main()
