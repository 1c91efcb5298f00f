"""Measure branches, in threads on the CPU and on streams on a GPU: a part of ``backward.py`` that also runs alone.

    python benchmarks/branches.py [--cuda]

On the CPU each way runs with 1, 4, 8, ... threads inside operators, and in splits of the cores: workers × threads.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import scrimp

Workers = int | str

Run = Callable[[Sequence[nn.Module], Tensor], list[Tensor]]


@dataclass(frozen=True)
class Claim:
    """A line of the table that closes the report: what was asked for and what was found."""

    what: str
    wanted: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Branches:
    """Branches over one input, and how often a step is worth repeating."""

    modules: list[nn.Module]
    data: Tensor
    rounds: int
    medium: bool = False


def branch_sets(few_cores: bool) -> dict[str, Branches]:
    """Branches of several sizes; ``medium`` are those for which threads are meant."""
    torch.manual_seed(0)

    def mlps(count: int, width: int) -> list[nn.Module]:
        return [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()) for _ in range(count)
        ]

    def layers(count: int, width: int) -> list[nn.Module]:
        return [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(count)]

    sets = {
        "16 MLPs, d=64": Branches(mlps(16, 64), torch.randn(64, 64), 41),
        "16 MLPs, d=512": Branches(mlps(16, 512), torch.randn(64, 512), 15, medium=True),
        "4 MLPs, d=1024": Branches(mlps(4, 1024), torch.randn(128, 1024), 15),
        "8 transformer layers, d=256": Branches(layers(8, 256), torch.randn(2, 128, 256), 9),
    }
    if not few_cores:
        sets["16 transformer layers, d=256"] = Branches(layers(16, 256), torch.randn(2, 128, 256), 9, medium=True)
        sets["8 transformer layers, d=512"] = Branches(layers(8, 512), torch.randn(4, 128, 512), 5)
    return sets


def serially(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    return [module(x) for module in modules]


# A row of a table takes about so long, if three rounds do.
_SECONDS_PER_ROW = 5.0
_FEWEST_ROUNDS = 3


def medians(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run all ways in turn, so often or as long as a row may take; the median seconds of each.

    Ways differ in the number of threads inside operators, and the first operator after a change starts threads: every
    run is warmed up by one of its own kind.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and time.perf_counter() - start > _SECONDS_PER_ROW:
            break
        for name, way in ways.items():
            way()
            seconds[name].append(way())
    return {name: statistics.median(values) for name, values in seconds.items()}


def _step(run: Run, branches: Branches, threads: int) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    sum(result.sum() for result in run(branches.modules, branches.data)).backward()
    return time.perf_counter() - start


def _forced(workers: int, threads: int) -> Run:
    return lambda modules, x: scrimp.parallel(modules, x, workers=workers, threads_per_worker=threads)


def on_the_cpu(console: Console) -> list[Claim]:
    """Forward and backward through ``parallel``, against the plain line at its best number of threads."""
    cores = torch.get_num_threads()
    counts = _thread_counts(cores)
    grid = [(cores // threads, threads) for threads in counts if cores // threads > 1]
    table = Table(
        "branches", *[f"plain, {count} thr., ms" for count in counts], *[f"{w} × {t}" for w, t in grid],
        "auto, best", "auto, worst",
        title="forward and backward; workers × threads in each: best plain time over parallel's; "
        "auto: the same, and at the worst the plain time at its own number of threads over auto's",
    )  # fmt: skip
    worst, medium = 2.0, []
    for name, branches in branch_sets(cores < 8).items():
        branches.data.requires_grad_()
        ways = {f"plain {count}": partial(_step, serially, branches, count) for count in counts}
        ways |= {f"{w} × {t}": partial(_step, _forced(w, t), branches, t) for w, t in grid}
        ways |= {f"auto {count}": partial(_step, scrimp.parallel, branches, count) for count in counts}
        for count in counts:
            for _ in range(6):  # while it makes up its mind
                _step(scrimp.parallel, branches, count)
        found = medians(ways, branches.rounds)
        best = min(found[f"plain {count}"] for count in counts)
        forced = {f"{w} × {t}": best / found[f"{w} × {t}"] for w, t in grid}
        auto = best / min(found[f"auto {count}"] for count in counts)
        least = min(found[f"plain {count}"] / found[f"auto {count}"] for count in counts)
        worst = min(worst, auto)
        if branches.medium and forced:
            medium.append((name, max(forced.values())))
        plain = [f"{found[f'plain {count}'] * 1e3:.2f}" for count in counts]
        table.add_row(name, *plain, *[f"{ratio:.2f}" for ratio in forced.values()], f"{auto:.2f}", f"{least:.2f}")
    torch.set_num_threads(cores)
    console.print(table)
    claims = [Claim('parallel, workers="auto", worst over best plain', "≥ 0.97", f"{worst:.2f}", worst >= 0.97)]
    for name, ratio in medium:
        claims.append(Claim(f"parallel, {name}", "≥ 1.5 on 16 cores", f"{ratio:.2f}", ratio >= 1.5 or cores < 16))
    return claims


def plain_graphs(console: Console, models: dict[str, Callable[[], Tensor]]) -> list[Claim]:
    """``backward(workers=...)`` over graphs that nobody marked, against PyTorch at its best number of threads."""
    cores = torch.get_num_threads()
    counts = _thread_counts(cores)
    grid = [(cores // threads, threads) for threads in counts if cores // threads > 1]
    steps: dict[str, tuple[Callable[[], Tensor], int]] = {
        name: (lambda of=branches: sum(m(of.data).square().mean() for m in of.modules), branches.rounds)
        for name, branches in branch_sets(cores < 8).items()
    }
    steps |= {name: (step, 9) for name, step in models.items()}
    table = Table("step", *[f"plain, {count} thr., ms" for count in counts], *[f"{w} × {t}" for w, t in grid],
                  "auto, best", "auto, worst", title="backward(workers=...) alone: columns as above")  # fmt: skip
    worst = least = 2.0
    for name, (step, rounds) in steps.items():
        ways = {f"plain {count}": partial(_pass, step, None, count) for count in counts}
        ways |= {f"{w} × {t}": partial(_pass, step, w, t) for w, t in grid}
        ways |= {f"auto {count}": partial(_pass, step, "auto", count) for count in counts}
        for count in counts:
            for _ in range(6):
                _pass(step, "auto", count)
        found = medians(ways, rounds)
        best = min(found[f"plain {count}"] for count in counts)
        auto = best / min(found[f"auto {count}"] for count in counts)
        own = min(found[f"plain {count}"] / found[f"auto {count}"] for count in counts)
        worst, least = min(worst, auto), min(least, own)
        plain = [f"{found[f'plain {count}'] * 1e3:.2f}" for count in counts]
        forced = [f"{best / found[f'{w} × {t}']:.2f}" for w, t in grid]
        table.add_row(name, *plain, *forced, f"{auto:.2f}", f"{own:.2f}")
    torch.set_num_threads(cores)
    console.print(table)
    return [
        Claim('backward(workers="auto"), worst over best plain', "≥ 0.97", f"{worst:.2f}", worst >= 0.97),
        Claim('backward(workers="auto"), worst at any thread count', "≥ 0.97", f"{least:.2f}", least >= 0.97),
    ]


def _thread_counts(cores: int) -> list[int]:
    return [count for count in (1, 2, 4, 8, 16) if count <= cores and (count != 2 or cores < 8)]


def _pass(step: Callable[[], Tensor], workers: Workers | None, threads: int) -> float:
    torch.set_num_threads(threads)
    loss = step()
    start = time.perf_counter()
    scrimp.backward(loss, workers=workers)
    return time.perf_counter() - start


def _gpu_sets() -> dict[str, Branches]:
    torch.manual_seed(0)

    def mlps(count: int, width: int, depth: int) -> list[nn.Module]:
        return [
            nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]).cuda()
            for _ in range(count)
        ]

    def layers(count: int, width: int) -> list[nn.Module]:
        return [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True).cuda() for _ in range(count)]

    def data(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    return {
        "8 MLPs, d=256, 256 rows (bound by launches)": Branches(mlps(8, 256, 4), data(256, 256), 31),
        "8 MLPs, d=1024, 512 rows": Branches(mlps(8, 1024, 4), data(512, 1024), 31, medium=True),
        "4 MLPs, d=2048, 1024 rows": Branches(mlps(4, 2048, 4), data(1024, 2048), 31, medium=True),
        "4 MLPs, d=4096, 4096 rows (fills the GPU)": Branches(mlps(4, 4096, 2), data(4096, 4096), 15),
        "8 transformer layers, d=512, 4×256 tokens": Branches(layers(8, 512), data(4, 256, 512), 31, medium=True),
    }


def _gpu_step(run: Run, branches: Branches) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    sum(result.sum() for result in run(branches.modules, branches.data)).backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _gradients(run: Run, branches: Branches) -> list[Tensor]:
    leaves = [branches.data, *(parameter for module in branches.modules for parameter in module.parameters())]
    for leaf in leaves:
        leaf.grad = None
    _gpu_step(run, branches)
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def on_the_gpu(console: Console) -> list[Claim]:
    """Streams against the plain line: time, bits and peak."""
    table = Table("branches", "plain, ms", "2 streams", "auto (4)", "a stream each", "same bits", "peak, auto",
                  title="GPU, forward and backward: plain time over parallel's")  # fmt: skip
    claims = []
    two: Run = lambda modules, x: scrimp.parallel(modules, x, workers=2)  # noqa: E731
    each: Run = lambda modules, x: scrimp.parallel(modules, x, workers=len(modules))  # noqa: E731
    for name, branches in _gpu_sets().items():
        branches.data.requires_grad_()
        runs: dict[str, Run] = {"plain": serially, "2": two, "auto": scrimp.parallel, "each": each}
        expected = _gradients(serially, branches)
        same = all(
            all(map(torch.equal, _gradients(run, branches), expected))
            for run in (two, scrimp.parallel)
            for _ in range(5)
        )
        found = medians({way: partial(_gpu_step, run, branches) for way, run in runs.items()}, branches.rounds)
        peaks = {way: _gpu_peak(run, branches) for way, run in runs.items()}
        ratios = {way: found["plain"] / found[way] for way in ("2", "auto", "each")}
        table.add_row(
            name, f"{found['plain'] * 1e3:.2f}", *[f"{ratio:.2f}" for ratio in ratios.values()],
            "yes" if same else "NO", f"{peaks['auto'] / peaks['plain']:.2f}",
        )  # fmt: skip
        claims.append(Claim(f"GPU, {name}: same bits in 10 runs", "yes", "yes" if same else "no", same))
        if branches.medium:
            ratio = max(ratios.values())
            claims.append(Claim(f"GPU, {name}: faster on streams", "> 1", f"{ratio:.2f}", ratio > 1))
        for leaf in (branches.data, *(p for module in branches.modules for p in module.parameters())):
            leaf.grad = None
    console.print(table)
    return claims


def _gpu_peak(run: Run, branches: Branches) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _gpu_step(run, branches)
    return torch.cuda.max_memory_allocated()


def machine() -> str:
    """What the figures were measured on."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    kind = platform.processor() or platform.machine()
    return f"torch {torch.__version__}, {kind}, {len(os.sched_getaffinity(0))} cores{gpu}"


def closing(console: Console, claims: list[Claim]) -> None:
    """The table that comes last: what was asked for and what was found."""
    table = Table("what", "wanted", "found", "", title="in one table")
    for claim in claims:
        table.add_row(claim.what, claim.wanted, claim.found, "" if claim.holds else "MISSED")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="measure branches on the GPU as well")
    arguments = parser.parse_args()
    console = Console(width=180)
    warnings.simplefilter("ignore", scrimp.errors.StackableBranchesWarning)
    console.print(machine())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    claims = plain_graphs(console, {}) + on_the_cpu(console)
    closing(console, claims + (on_the_gpu(console) if arguments.cuda else []))


if __name__ == "__main__":
    main()
