"""The demonstration: a small GPT learns some sonnets, plainly and within a part of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import resources
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp._budget import format_bytes
from scrimp._budget_session import BudgetSession
from scrimp._limit import limit
from scrimp.testing import LiveBytes, live_bytes

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 96, 4, 4, 128, 8
_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64
_COUNTED_FROM_THE_START = 4  # steps; after those every other one is counted, and the others are timed


class Block(nn.Module):
    """Attention and a perceptron, with dropout, as everybody writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch of sequences."""
        q, k, v = (
            part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)), 0.1)
        result: Tensor = x + self.perceptron(self.norm2(x))
        return result


class GPT(nn.Module):
    """A character-level language model."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets``."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        loss: Tensor = F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())
        return loss


@dataclass(slots=True)
class Run:
    """What one training run measured.

    Attributes:
        losses: of every step.
        seconds: forward and backward, of the steps that are timed.
        peaks: bytes of the steps that are counted: model, optimizer state, batch, gradients, and all that is between.
        timeline: bytes after each operator of the latest of these.
    """

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    timeline: list[int] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return median(self.seconds or [0.0]) * 1e3


class _Timeline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the live bytes after every operator."""

    def __init__(self, count: LiveBytes, into: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._into.append(self._count.now)
        return result


def _batches(text: str, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    letters = sorted(set(text))
    encoded = torch.tensor([letters.index(letter) for letter in text])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(encoded) - LENGTH - 1, (BATCH,), generator=generator)
        windows = torch.stack([encoded[start : start + LENGTH + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def _train(text: str, steps: int, budget: int | None, tick: Callable[[Run], None]) -> tuple[Run, BudgetSession | None]:
    torch.manual_seed(0)
    model = GPT(len(set(text)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = None if budget is None else limit(model, budget)
    run = Run()
    for number, (tokens, targets) in enumerate(_batches(text, steps)):
        counted = number < _COUNTED_FROM_THE_START or number % 2 == 0
        run.timeline = [] if counted else run.timeline
        with live_bytes() if counted else nullcontext() as count:
            start = time.perf_counter()
            with nullcontext() if count is None else _Timeline(count, run.timeline):
                loss = model(tokens, targets)
                loss.backward()
            seconds = time.perf_counter() - start
        if count is None:
            run.seconds.append(seconds)
        else:
            held = _held(model, optimizer) + tokens.untyped_storage().nbytes()
            run.peaks.append(held + count.peak)
            run.timeline = [held + level for level in run.timeline]
        run.losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        tick(run)
    return run, session


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = [entry for entries in optimizer.state.values() for entry in entries.values() if isinstance(entry, Tensor)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state))


def _sparkline(timeline: list[int], most: int) -> str:
    """Draw live bytes over a step, each column the most of its share."""
    columns = []
    for column in range(_COLUMNS):
        share = timeline[len(timeline) * column // _COLUMNS : max(1, len(timeline) * (column + 1) // _COLUMNS)]
        columns.append(_BARS[round(max(share, default=0) / most * (len(_BARS) - 1))])
    return "".join(columns)


@contextmanager
def _progress(console: Console, name: str, steps: int) -> Iterator[Callable[[Run], None]]:
    columns = (
        TextColumn("{task.description:<7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=steps, now="")

        def tick(run: Run) -> None:
            now = f"peak {max(run.peaks) / 2**20:.2f} MiB, loss {run.losses[-1].item():.4f}"
            progress.update(bar, advance=1, now=now)

        yield tick


def demo(console: Console, steps: int, fraction: float) -> bool:
    """Train twice and report; True if both runs agree to the last bit."""
    text = resources.files("scrimp").joinpath("data/sonnets.txt").read_text(encoding="utf-8")
    with _progress(console, "plain", steps) as tick:
        plain, _ = _train(text, steps, None, tick)
    budget = int(max(plain.peaks) * fraction)
    console.print(f'session = scrimp.limit(model, "{format_bytes(budget)}")', highlight=False)
    with _progress(console, "scrimp", steps) as tick:
        ours, session = _train(text, steps, budget, tick)
    assert session is not None
    _report(console, plain, ours, budget)
    if session.plan is not None:
        console.print(f"The plan: {session.plan}.", soft_wrap=True, highlight=False)
    session.detach()
    return _same(plain, ours)


def _same(plain: Run, ours: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(plain.losses, ours.losses, strict=True))


def _report(console: Console, plain: Run, ours: Run, budget: int) -> None:
    most = max(plain.peaks)
    console.print("\nBytes in use over a step, forward and then backward:")
    for name, run in (("plain", plain), ("scrimp", ours)):
        console.print(f"  {name:<7}{_sparkline(run.timeline, most)}", highlight=False)
    table = Table("", "plain", "scrimp", "")
    rows = (("peak, first step", plain.peaks[0], ours.peaks[0]), ("peak, all steps", most, max(ours.peaks)))
    for name, before, now in rows:
        verdict = f"{'within' if now <= budget else 'OVER'} {budget / 2**20:.2f} MiB"
        table.add_row(name, f"{before / 2**20:.2f} MiB", f"{now / 2**20:.2f} MiB", verdict)
    if plain.seconds:
        ratio = ours.milliseconds / plain.milliseconds
        times = (f"{run.milliseconds:.0f} ms" for run in (plain, ours))
        table.add_row("time of a step", *times, f"{ratio - 1:+.0%}")
    table.add_row("first loss", f"{plain.losses[0].item():.9f}", f"{ours.losses[0].item():.9f}", "")
    verdict = "equal to the last bit" if _same(plain, ours) else "DIFFERENT"
    table.add_row("last loss", f"{plain.losses[-1].item():.9f}", f"{ours.losses[-1].item():.9f}", verdict)
    console.print(table)
