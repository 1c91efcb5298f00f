"""The demonstration: a small GPT learns some sonnets, plainly and within a part of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp._session import Session, session
from scrimp._simulate import simulate
from scrimp._solve import plan
from scrimp._tracing import trace
from scrimp.policy import Planned
from scrimp.testing import LiveBytes, live_bytes

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 96, 4, 4, 128, 8
_BARS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64


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
    """What one training run measured."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0
    timeline: list[int] = field(default_factory=list)
    """Live bytes after each operator of the last step."""


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


def _train(text: str, steps: int, within: Callable[[], AbstractContextManager[Any]], tick: Callable[[], None]) -> Run:
    torch.manual_seed(0)
    model = GPT(len(set(text)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = Run()
    for tokens, targets in _batches(text, steps):
        run.timeline.clear()
        with live_bytes() as count:
            start = time.perf_counter()
            with _Timeline(count, run.timeline):
                with within():
                    loss = model(tokens, targets)
                loss.backward()
            run.seconds += time.perf_counter() - start
        run.peak = max(run.peak, count.peak)
        run.losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        tick()
    return run


def _sparkline(timeline: list[int], most: int) -> str:
    """Draw live bytes over a step, each column the most of its share."""
    columns = []
    for column in range(_COLUMNS):
        share = timeline[len(timeline) * column // _COLUMNS : max(1, len(timeline) * (column + 1) // _COLUMNS)]
        columns.append(_BARS[round(max(share, default=0) / most * (len(_BARS) - 1))])
    return "".join(columns)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def demo(console: Console, steps: int, fraction: float) -> bool:
    """Train twice and report; True if both runs agree to the last bit."""
    text = resources.files("scrimp").joinpath("data/sonnets.txt").read_text(encoding="utf-8")
    torch.manual_seed(0)
    seen = trace(GPT(len(set(text))), *next(_batches(text, 1)))
    before = sum(part.nbytes for part in seen.resident)
    budget = before + int((simulate(seen).peak - before) * fraction)
    made = plan(seen, budget)
    console.print(f"A traced step: {len(seen.ops)} operators. The plan: {made}.", soft_wrap=True, highlight=False)
    limited = session(Planned(seen, made))
    with _progress(console) as progress:
        plain_bar = progress.add_task("plain", total=steps)
        plain = _train(text, steps, nullcontext, lambda: progress.advance(plain_bar))
        bar = progress.add_task("as planned", total=steps)
        ours = _train(text, steps, lambda: limited, lambda: progress.advance(bar))
    _report(console, plain, ours, limited, made.peak - before)
    return all(torch.equal(a, b) for a, b in zip(plain.losses, ours.losses, strict=True))


def _report(console: Console, plain: Run, ours: Run, limited: Session, predicted: int) -> None:
    steps = len(plain.losses)
    console.print("\nLive bytes over a step, forward and then backward:")
    for name, run in (("plain", plain), ("scrimp", ours)):
        console.print(f"  {name:<7}{_sparkline(run.timeline, plain.peak)}", highlight=False)
    table = Table("", "plain", "scrimp", "scrimp / plain")
    table.add_row(
        "peak of live bytes", f"{plain.peak / 2**20:.2f} MiB", f"{ours.peak / 2**20:.2f} MiB",
        f"{ours.peak / plain.peak:.2f}",
    )  # fmt: skip
    table.add_row("as predicted", "", f"{predicted / 2**20:.2f} MiB", "")
    table.add_row(
        "forward and backward", f"{plain.seconds / steps * 1e3:.0f} ms", f"{ours.seconds / steps * 1e3:.0f} ms",
        f"{ours.seconds / plain.seconds:.2f}",
    )  # fmt: skip
    table.add_row("first loss", f"{plain.losses[0].item():.9f}", f"{ours.losses[0].item():.9f}", "")
    same = all(torch.equal(a, b) for a, b in zip(plain.losses, ours.losses, strict=True))
    verdict = "equal to the last bit" if same else "DIFFERENT"
    table.add_row("last loss", f"{plain.losses[-1].item():.9f}", f"{ours.losses[-1].item():.9f}", verdict)
    console.print(table)
    statistics = limited.statistics
    console.print(
        f"Per step, {statistics.made.total // steps} values were saved and {statistics.dropped.total // steps} of them "
        f"dropped; {statistics.replayed_operators // steps} operators ran again.",
        soft_wrap=True,
    )
