"""What a step under a budget costs the host, beside a session that keeps everything.

    python benchmarks/limit_overhead.py [--rounds 60]

A small model, so that what the host does shows. Five ways to run a step take turns; the table has medians, and medians
of the ratios to the plain step of the same round, in process time, which waits for nobody.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import scrimp
import scrimp.testing

WARM_UP = 6  # steps: one is recorded, one watched, and what is there beforehand is looked up in some


def model() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    return nn.Sequential(*(block() for _ in range(12)))


def way(make: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor], float]:
    """Return what times one step of a model of its own."""
    limited = model()
    forward = make(limited)

    def step(batch: torch.Tensor) -> float:
        limited.zero_grad()
        start = time.process_time()
        forward(batch).square().mean().backward()
        return time.process_time() - start

    return step


def within(session: scrimp.Session) -> Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]:
    def make(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(batch: torch.Tensor) -> torch.Tensor:
            with session:
                return module(batch)

        return forward

    return make


def limited(activations: int) -> Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]:
    def make(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        scrimp.limit(module, activations=activations)
        return module

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(64, 64)
    with scrimp.testing.live_bytes() as count:
        model()(batch).square().mean().backward()
    ways = {
        "plain": way(lambda module: module),
        "session that keeps everything": way(within(scrimp.session(policy=scrimp.policy.KeepAll()))),
        "limit, with room for everything": way(limited(2 * count.peak)),
        "session that records and keeps what it can": way(within(scrimp.session(policy=scrimp.policy.Online(1 << 40)))),
        "limit, half of the activations": way(limited(count.peak // 2)),
    }
    for step in ways.values():
        for _ in range(WARM_UP):
            step(batch)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            taken[name].append(step(batch))
    print(f"{'':44} {'ms':>8} {'of plain':>9}")
    for name, seconds in taken.items():
        ratio = median(ours / plain for ours, plain in zip(seconds, taken["plain"], strict=True))
        print(f"{name:44} {median(seconds) * 1e3:8.2f} {ratio:9.2f}")


if __name__ == "__main__":
    main()
