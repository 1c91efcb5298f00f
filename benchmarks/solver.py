"""How long planning takes: processor time of one plan, for deep models at four budgets.

    python benchmarks/solver.py [--operators 1000 20000] [MODEL ...]

The models are followed on described tensors (:func:`scrimp.trace_on`), so that depth costs nothing but the tracing; the
time of a plan does not depend on the sizes of tensors. Beside the seconds stands the ratio to one simulation of the
plain step on the same machine, which is the same on machines of other speed. Budgets are shares of the way from the
smallest one found (at a share of 0.02, chains need values to be recomputed many times) to the plain peak.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

import scrimp
from architectures import Bottleneck
from blocks import GPTBlock, LlamaBlock
from scrimp._solve._planner import Planner
from scrimp.planning import Trace, simulate

SHARES = (0.8, 0.5, 0.2, 0.02)


class Stack(nn.Module):
    """Equal blocks, one after the other."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of what comes out."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Cell(nn.Module):
    """A step of an LSTM whose states are both handed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Take one step."""
        return torch.stack(self.cell(states[0], (states[0], states[1])))


STACKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gpt": (lambda: GPTBlock(1024, 8), (4, 1024, 1024)),
    "llama": (lambda: LlamaBlock(1024, 8), (4, 1024, 1024)),
    "resnet": (lambda: Bottleneck(256, 64, 1), (32, 256, 56, 56)),
    "lstm": (cache(lambda: Cell(512)), (2, 256, 512)),
}
"""By name, what makes a block, and the shape of what it reads and returns. The cell is one: its stack is a loop."""


def stack_of(name: str, operators: int) -> Trace:
    """A stack of as many blocks as have about so many operators."""
    block, shape = STACKS[name]

    def of(depth: int) -> Trace:
        with torch.device("meta"):
            return scrimp.trace_on("H200", Stack(block, depth), torch.empty(shape))

    one, two = len(of(1).ops), len(of(2).ops)
    return of(max(1, round((operators - one) / (two - one))))


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(STACKS))
    parser.add_argument("--operators", type=int, nargs="+", default=[1000, 20000])
    options = parser.parse_args()
    print(f"{'model':8} {'ops':>6} {'share':>6} {'plan':>8} {'simulations':>12} {'time':>8} {'no plan below':>13}")
    for operators in options.operators:
        for name in options.models:
            trace = stack_of(name, operators)
            once = min(cpu_seconds(partial(simulate, trace)) for _ in range(3))
            planner = Planner(trace)
            smallest, plain = planner.smallest(), planner.plain
            for share in SHARES:
                budget = int(smallest.peak + share * (plain.peak - smallest.peak))
                start = time.process_time()
                made = scrimp.plan(trace, budget)
                seconds = time.process_time() - start
                print(
                    f"{name:8} {len(trace.ops):6} {share:6.2f} {seconds:6.2f} s {seconds / once:11.0f}x "
                    f"{made.added_seconds / made.plain_seconds:+8.2%} "
                    f"{made.bound_seconds / made.plain_seconds - 1:+13.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
