"""Peak against step time, in one run: scrimp at many budgets, and what users have today.

    python benchmarks/frontier.py [--device cuda] [--budgets 8] [--rounds 5] [--host 32GiB] [--plot FILE] [MODEL ...]

The alternatives are plain PyTorch, ``torch.utils.checkpoint`` around every block and around every second one, selective
checkpointing that keeps matrix products and attention, ``save_on_cpu``, and blocks compiled with
``activation_memory_budget`` in steps. Blocks are the children of the model's largest ``ModuleList`` or ``Sequential``.

On a GPU the models are those of ``models.py`` in their real sizes, and time is the clock's. On the CPU they are
:data:`MEDIUM`, large enough for their arithmetic to outweigh the cost of watching operators, and time is the
processor's, of all threads. Rounds visit all runs in turn, and each run is compared with plain steps right before it,
so that a change of the machine's mood hits both alike; a time is the median of a run's ratios. The peak is of the whole
step, parameters and inputs included: on a GPU that of the allocator, on the CPU that of the live storages. Compiled
blocks allocate where these cannot be counted, and are measured on a GPU only; once, since they compile anew each time.
An eager alternative that no budget beats is marked, if by more than 1% of the step's time.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import scrimp
from architectures import ResNet, UNet
from blocks import GPTBlock, LlamaBlock
from models import MODELS
from scrimp.testing import live_bytes

aten = torch.ops.aten
KEPT = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip
MEDIUM: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": lambda: (Stack(GPTBlock, 8, 256, 1000), (torch.randint(1000, (4, 256)),)),
    "llama": lambda: (Stack(LlamaBlock, 8, 256, 1000), (torch.randint(1000, (4, 256)),)),
    "resnet": lambda: (ResNet((2, 3, 2), 32, 10), (torch.randn(8, 3, 128, 128), torch.randint(10, (8,)))),
    "unet": lambda: (UNet(3, 16), (torch.randn(4, 3, 96, 96), torch.randn(4, 3, 96, 96))),
}
"""By name, what makes a model for the CPU and its batch."""

COMPILED = (1.0, 0.5, 0.25, 0.0)
WARM = 5  # steps before any is measured
CLOSE = 0.01  # of the plain step: differences below it are noise


class Stack(nn.Module):
    """Blocks between an embedding and a loss over a vocabulary."""

    def __init__(self, block: Callable[[int, int], nn.Module], depth: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(block(width, 4) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting the tokens."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


@dataclass
class Run:
    """A way to run the step, and what was measured of it."""

    name: str
    attached: Callable[[], AbstractContextManager[None]]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    peak: int = 0
    ratios: list[float] = field(default_factory=list)
    why_not: str = ""
    once: bool = False
    """Whether it takes too long to be visited in every round."""

    @property
    def over_plain(self) -> float:
        """The part of the plain step's time that it adds."""
        return statistics.median(self.ratios) - 1


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The children of the list of modules that holds the most parameters; of equals, the longest."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
    return list(max(lists, key=lambda one: (sum(part.numel() for part in one.parameters()), len(one)), default=[]))


def selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextmanager
def checkpointed(blocks: list[nn.Module], **options: object) -> Iterator[None]:
    """Have the blocks run under torch's checkpoint."""
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def compiled(blocks: list[nn.Module], budget: float) -> Iterator[None]:
    """Have each block compiled, to save this part of its activations."""
    import torch._functorch.config as config

    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget), ExitStack() as stack:
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
            stack.callback(delattr, block, "forward")
        yield


@contextmanager
def limited(model: nn.Module, budget: int, host: str | None = None) -> Iterator[None]:
    session = scrimp.limit(model, budget, host=host)
    try:
        yield
    finally:
        session.detach()


class Bench:
    """A model, its plain step, and everything else measured against it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        self.clock = time.perf_counter if device.type == "cuda" else time.process_time
        if device.type == "cuda":
            self.model, make_batch = MODELS[name](tiny=False, device=device)
            self.batch = make_batch()
        else:
            torch.manual_seed(0)
            self.model, self.batch = MEDIUM[name]()
        self.resident = sum(one.nbytes for one in (*self.model.parameters(), *self.model.buffers(), *self.batch))
        blocks = blocks_of(self.model)
        self.plain = Run("plain", nullcontext)
        self.others = [
            Run("checkpoint, every block", lambda: checkpointed(blocks)),
            Run("checkpoint, every 2nd block", lambda: checkpointed(blocks[::2])),
            Run("selective checkpoint", lambda: checkpointed(blocks, context_fn=selective)),
            Run("save_on_cpu", nullcontext, partial(save_on_cpu, pin_memory=device.type == "cuda"), once=True),
        ]
        parts = COMPILED if device.type == "cuda" else ()
        self.compiled = [Run(f"compiled, budget {part}", partial(compiled, blocks, part), once=True) for part in parts]
        self.visit(self.plain)
        self.ours: list[Run] = []

    def our_runs(self, budgets: int, host: str | None) -> list[Run]:
        """Runs of scrimp within evenly spaced budgets, and within the bytes that the eager alternatives took."""
        spaced = self.budgets(budgets)
        theirs = [run.peak for run in self.others if run.ratios and not run.once and run.peak >= spaced[-1]]
        stated = sorted({*spaced, *theirs}, reverse=True)
        runs = [Run(f"scrimp {one / 2**20:.1f} MiB", partial(limited, self.model, one)) for one in stated]
        for one in stated if host else ():
            runs.append(Run(f"scrimp {one / 2**20:.1f} MiB, host", partial(limited, self.model, one, host)))
        return runs

    def budgets(self, count: int) -> list[int]:
        """From the plain peak down to the smallest, evenly spaced by ratio."""
        seen = scrimp.trace(self.model, *self.batch)
        smallest, *_, largest = scrimp.frontier(seen, points=2)
        least = smallest.peak + max(self.plain.peak - largest.peak, 0)
        ratio = (least / self.plain.peak) ** (1 / (count - 1))
        return [max(round(self.plain.peak * ratio**number), least) for number in range(count)]

    def step(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """Run forward and backward."""
        with around():
            loss: Tensor = self.model(*self.batch)
        loss.backward()

    def visit(self, run: Run) -> None:
        """Measure a run's peak and its time, beside that of plain steps; a way that fails is not visited again."""
        plain = self.time(self.plain)
        try:
            run.ratios.append(self.time(run) / plain)
        except (RuntimeError, scrimp.ScrimpError) as error:
            run.why_not = f"{type(error).__name__}: {str(error).splitlines()[0]:.80}"
        self.model.zero_grad()

    def time(self, run: Run, steps: int = 4) -> float:
        """Seconds of the fastest of a few steps, after some to trace, plan, try the plan, or compile; and the peak."""
        found = []
        with run.attached():
            for number in range(WARM + steps):
                self.model.zero_grad()
                gc.collect()
                if number == WARM - 1:
                    run.peak = self.peak_of_a_step(run)
                    continue
                self.wait()
                start = self.clock()
                self.step(run.around)
                self.wait()
                found.append(self.clock() - start)
        self.model.zero_grad()
        return min(found[-steps:])

    def peak_of_a_step(self, run: Run) -> int:
        """The most bytes in use while a step runs."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(run.around)
            return torch.cuda.max_memory_allocated(self.device)
        with live_bytes() as count:
            self.step(run.around)
        return self.resident + count.peak

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, rounds: int, budgets: int, host: str | None) -> None:
        """Fill in peaks and ratios."""
        for number in range(rounds):
            for runs in (self.others, self.ours, self.compiled):
                if runs is self.ours and not number:
                    runs[:] = self.our_runs(budgets, host)
                for run in runs:
                    if not run.why_not and not (run.once and number):
                        self.visit(run)
                        shown = run.why_not or f"{run.peak / 2**20:10.2f} MiB {run.ratios[-1] - 1:+8.1%}"
                        print(f"round {number + 1}: {run.name:28} {shown}", flush=True)

    def is_beaten(self, other: Run) -> bool:
        """Whether scrimp is as fast, or within the noise, at no more memory."""
        return any(
            one.peak <= other.peak and one.over_plain <= other.over_plain + CLOSE for one in self.ours if one.ratios
        )


def table(name: str, bench: Bench) -> None:
    threads = f", {torch.get_num_threads()} threads" if bench.device.type == "cpu" else ""
    there = f"{bench.resident / 2**20:.2f}"
    print(f"\n{name}{threads}: peak of the step in MiB, {there} of them there before it; time over plain")
    for run in (bench.plain, *bench.others, *bench.compiled, *bench.ours):
        if run.why_not:
            print(f"  {run.name:28} {run.why_not}")
            continue
        above = run in bench.others and not bench.is_beaten(run)
        print(f"  {run.name:28} {run.peak / 2**20:10.2f} {run.over_plain:+8.1%}{'  above our curve' if above else ''}")


def plot(path: Path, benches: dict[str, Bench]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(benches), figsize=(5 * len(benches), 4), squeeze=False)
    for axis, (name, bench) in zip(axes[0], benches.items(), strict=True):
        ours = [run for run in (bench.plain, *bench.ours) if run.ratios]
        for label, part in (("scrimp", "MiB"), ("scrimp, host memory too", "host")):
            curve = [run for run in ours if run.name.endswith((part, "plain"))]
            if len(curve) > 1:
                axis.plot(
                    [run.peak / 2**20 for run in curve], [100 * run.over_plain for run in curve], "o-", label=label
                )
        for run in (*bench.others, *bench.compiled):
            if run.ratios:
                axis.plot([run.peak / 2**20], [100 * run.over_plain], "s", label=run.name)
        axis.set(title=name, xlabel="peak of the step, MiB", ylabel="time over plain, %")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", help="bytes of host memory, for a second curve of ours that may use them")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file; needs matplotlib")
    options = parser.parse_args()
    device = torch.device(options.device)
    benches = {}
    for name in options.models or (MODELS if device.type == "cuda" else MEDIUM):
        benches[name] = Bench(name, device)
        benches[name].measure(options.rounds, options.budgets, options.host)
        table(name, benches[name])
    if options.plot:
        plot(options.plot, benches)


if __name__ == "__main__":
    main()
