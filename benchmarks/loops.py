"""Long loops: memory and time of scan against plain unrolling, nested torch.utils.checkpoint and, for reference, JAX.

Run: python benchmarks/loops.py [--steps 512] [--repeats 3] [--device cuda] [--long 100000]

All variants are interleaved in one run; times are medians. Memory is the peak of live bytes over forward and backward,
parameters and xs left out. With JAX and equinox installed (pip install jax equinox), JAX's scan, plain and with blocks
of steps checkpointed, and equinox's checkpointed while loop run beside them; their memory is what XLA says that the
compiled step needs for temporaries. --long runs a small RNN for that many steps and tells the time of each.
"""

import argparse
import importlib.util
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp.testing import live_bytes

Loop = Callable[[Callable[..., Any], Tensor, Tensor], Tensor]


class Heat(nn.Module):
    """An explicit step of a 2-D heat equation with a conductivity in each cell."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conductivity = nn.Parameter(torch.full((size, size), 0.2))

    def forward(self, u: Tensor, source: Tensor) -> Tensor:
        """Advance by one step."""
        around = u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1)
        return u + self.conductivity * (around - 4 * u) + source


def plain(step: Callable[..., Any], state: Tensor, xs: Tensor) -> Tensor:
    for x in xs.unbind(0):
        state = step(state, x)
    return state


def nested(levels: int) -> Loop:
    """Checkpoints within checkpoints: each level cuts its steps into as many parts."""

    def run(step: Callable[..., Any], state: Tensor, xs: Tensor) -> Tensor:
        parts = math.ceil(len(xs) ** (1 / (levels + 1)) - 1e-9)

        def level(state: Tensor, xs: Tensor, depth: int) -> Tensor:
            if depth == 0 or len(xs) == 1:
                return plain(step, state, xs)
            for part in xs.chunk(parts):
                state = checkpoint(level, state, part, depth - 1, use_reentrant=False)
            return state

        return level(state, xs, levels)

    return run


def ours(**ways: Any) -> Loop:
    return lambda step, state, xs: scrimp.scan(lambda h, x: (step(h, x), None), state, xs, **ways)[0]


def compare(title: str, model: nn.Module, step: Callable[..., Any], state: Tensor, xs: Tensor, repeats: int) -> None:
    n = len(xs)
    loops: dict[str, Loop] = {
        "plain": plain,
        "torch checkpoint, blocks of √n steps": nested(1),
        "torch checkpoint, nested 3 deep": nested(3),
        "scan": ours(),
        "scan, slots=20": ours(slots=20),
        "scan, slots=5": ours(slots=5),
    }

    def run(loop: Loop, count: bool) -> tuple[float, int]:
        model.zero_grad()
        on_gpu = state.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        if count and not on_gpu:
            with live_bytes() as counted:
                loop(step, state, xs).square().mean().backward()
            return 0.0, counted.peak
        loop(step, state, xs).square().mean().backward()
        if on_gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        return time.perf_counter() - start, peak

    peaks = {name: run(loop, True)[1] for name, loop in loops.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            times[name].append(run(loop, False)[0])
    table = Table(f"{title}, {n} steps", "ms", "time / plain", "peak MiB", "memory / plain")
    base = statistics.median(times["plain"])
    for name in loops:
        median = statistics.median(times[name])
        table.add_row(
            name, f"{median * 1e3:.0f}", f"{median / base:.2f}", f"{peaks[name] / 2**20:.2f}",
            f"{peaks[name] / peaks['plain']:.4f}",
        )  # fmt: skip
    Console().print(table)


def with_jax(steps: int, size: int, repeats: int) -> None:
    """The heat equation in JAX: its own loop, with steps checkpointed, and with blocks of steps checkpointed."""
    import jax
    import jax.numpy as jnp

    def step(conductivity: Any, u: Any) -> Any:
        around = jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1)
        return u + conductivity * (around - 4 * u)

    def in_blocks(blocks: int, wrap: Callable[..., Any]) -> Callable[..., Any]:
        def run(conductivity: Any, u: Any) -> Any:
            def block(u: Any, _: Any) -> Any:
                one = jax.lax.scan(lambda u, _: (step(conductivity, u), None), u, None, length=steps // blocks)
                return one[0], None

            return jnp.mean(jax.lax.scan(wrap(block), u, None, length=blocks)[0] ** 2)

        return run

    def checkpointed_while(checkpoints: int) -> Callable[..., Any]:
        def run(conductivity: Any, u: Any) -> Any:
            final = while_loop(
                lambda s: s[1] < steps, lambda s: (step(conductivity, s[0]), s[1] + 1), (u, 0),
                max_steps=steps, kind="checkpointed", checkpoints=checkpoints,
            )  # fmt: skip
            return jnp.mean(final[0] ** 2)

        return run

    losses = {
        "plain": in_blocks(steps, lambda block: block),
        "checkpointed blocks of √n steps": in_blocks(2 ** round(math.log2(steps) / 2), jax.checkpoint),
    }
    if importlib.util.find_spec("equinox") is not None:
        from equinox.internal import while_loop

        for checkpoints in (20, 5):
            losses[f"equinox while loop, checkpoints={checkpoints}"] = checkpointed_while(checkpoints)
    u, conductivity = jnp.ones((size, size)), jnp.full((size, size), 0.2)
    steppers = {name: jax.jit(jax.grad(loss)).lower(conductivity, u).compile() for name, loss in losses.items()}
    times: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(repeats + 1):
        for name, compiled in steppers.items():
            start = time.perf_counter()
            compiled(conductivity, u).block_until_ready()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - start)
    table = Table(
        f"JAX {jax.__version__}, heat equation, {size}², {steps} steps", "ms", "time / plain", "temporaries, MiB",
        "memory / plain",
    )  # fmt: skip
    bases = statistics.median(times["plain"]), steppers["plain"].memory_analysis().temp_size_in_bytes
    for name, compiled in steppers.items():
        median, temporaries = statistics.median(times[name]), compiled.memory_analysis().temp_size_in_bytes
        table.add_row(
            name, f"{median * 1e3:.0f}", f"{median / bases[0]:.2f}", f"{temporaries / 2**20:.2f}",
            f"{temporaries / bases[1]:.4f}",
        )  # fmt: skip
    Console().print(table)


def long_loop(steps: int) -> None:
    """A small RNN: the peak and the time of each step do not depend on how many there are, for as many repeats."""
    w, start = (torch.randn(32, 32) / 12).requires_grad_(), torch.rand(32)

    def step(h: Tensor, _: None) -> Any:
        return torch.mv(w, h).tanh(), None

    def unrolled(length: int) -> Tensor:
        h = start
        for _ in range(length):
            h, _ = step(h, None)
        return h

    def run(length: int, loop: Callable[[int], Tensor]) -> tuple[float, float, int]:
        w.grad = None
        begin = time.perf_counter()
        last = loop(length)
        between = time.perf_counter()
        last.sum().backward()
        done = time.perf_counter() - between
        del last
        with live_bytes() as counted:
            loop(length).sum().backward()
        return (between - begin) / length * 1e6, done / length * 1e6, counted.peak

    slots = 450  # with which 2 ⋅ 10³ to 10⁵ steps are advanced over twice at most, the first time included
    table = Table("small RNN, 32 units", "steps", "forward, µs a step", "backward, µs a step", "peak, kB")
    for name, length, loop in (
        ("plain", steps // 50, unrolled),
        *((f"scan, slots={slots}", steps // share, lambda n: scrimp.scan(step, start, length=n, slots=slots)[0])
          for share in (50, 10, 1)),
    ):  # fmt: skip
        forward, back, peak = run(length, loop)
        table.add_row(name, str(length), f"{forward:.0f}", f"{back:.0f}", f"{peak / 1e3:.1f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512, help="a power of two")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", type=int, default=0, metavar="STEPS", help="run a small RNN for so many steps, too")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
    print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads, medians of {arguments.repeats}")
    torch.manual_seed(0)
    with torch.device(arguments.device):
        cell = nn.GRUCell(32, 128)
        compare("GRU cell, 32 → 128, batch 16", cell, lambda h, x: cell(x, h), torch.zeros(16, 128),
                torch.randn(arguments.steps, 16, 32), arguments.repeats)  # fmt: skip
        heat = Heat(64)
        compare("Heat equation, 64²", heat, heat, torch.rand(64, 64),
                torch.zeros(arguments.steps, 1), arguments.repeats)  # fmt: skip
    if importlib.util.find_spec("jax") is not None:
        with_jax(arguments.steps, 64, arguments.repeats)
    else:
        print("JAX is not installed; its reference figures are left out")
    if arguments.long:
        long_loop(arguments.long)
