"""Random training steps that can be built twice, exactly alike."""

from __future__ import annotations

import faulthandler
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scrimp._engine import threaded
from scrimp._engine.cost import Memory
from scrimp._engine.split import Split


class InjectedError(Exception):
    """The error that the tests inject."""


class Scale(torch.autograd.Function):
    """Multiplies by two; may raise in its backward, or run a backward of its own there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: bool, nested: bool) -> Tensor:
        """Save ``x``, so that a freed graph is noticed."""
        ctx.save_for_backward(x)
        ctx.fault, ctx.nested = fault, nested
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Twice the gradient, with what was asked for at the forward."""
        (x,) = ctx.saved_tensors
        if ctx.fault:
            raise InjectedError("in a custom Function")
        if ctx.nested:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (y * 2).sum().backward()
            return gradient * y.grad, None, None
        return gradient * 2, None, None


@dataclass
class Step:
    """A forward pass that has been run, and what its hooks noted."""

    leaves: list[Tensor]
    loss: Tensor
    retained: list[Tensor] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def gradients(self) -> list[Tensor | None]:
        """Those of the leaves, then those of the tensors that retain theirs."""
        return [tensor.grad for tensor in [*self.leaves, *self.retained]]


class _Builder:
    """Grows a random graph. ``exact`` keeps every value a small integer, so that sums have no order."""

    def __init__(self, seed: int, *, exact: bool, fault: bool) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.exact = exact
        self.log: list[str] = []
        self.retained: list[Tensor] = []
        self.leaves = [self._leaf() for _ in range(self.random.randint(1, 4))]
        self.pool = list(self.leaves)
        self.size = self.random.randint(3, 30)
        self.fault_at = self.random.randrange(self.size) if fault else -1

    def _leaf(self) -> Tensor:
        values = torch.randint(-3, 4, (4, 4), generator=self.generator).double()
        if not self.exact:
            values = values + torch.rand(4, 4, generator=self.generator, dtype=torch.float64)
        return values.float().requires_grad_() if not self.exact else values.requires_grad_()

    def pick(self) -> Tensor:
        recent = self.pool[-6:] if self.random.random() < 0.7 else self.pool
        return self.random.choice(recent)

    def build(self) -> Step:
        for index in range(self.size):
            self.pool.append(self._fault() if index == self.fault_at else self._operator(index))
        ends = self.random.sample(self.pool, min(len(self.pool), self.random.randint(1, 5)))
        if self.fault_at >= 0:
            ends.append(self.pool[len(self.leaves) + self.fault_at])
        loss = sum((end.sum() for end in ends), self.pool[-1].sum())
        return Step(self.leaves, loss, self.retained, self.log)

    def _fault(self) -> Tensor:
        x = self.pick() * 1.0
        if self.random.random() < 0.5:
            return Scale.apply(x, True, False)

        def hook(_: Any) -> None:
            raise InjectedError("in a hook")

        x.register_hook(hook)
        return x

    def _operator(self, index: int) -> Tensor:
        x, y = self.pick(), self.pick()
        operators: list[Callable[[], Tensor]] = [
            lambda: x + y,
            lambda: x - y * 2,
            lambda: x * self.random.choice([-1.0, 2.0, 1.0]),
            lambda: torch.relu(x),
            lambda: x.t() + y,
            lambda: sum(x.unbind(0)).expand(4, 4) + y,
            lambda: torch.cat([x[:2], y[2:]]),
            lambda: Scale.apply(x, False, False),
            lambda: Scale.apply(x, False, True),
            lambda: checkpoint(lambda a, b: (a + b) * 2, x, y, use_reentrant=False),
            lambda: checkpoint(lambda a, b: a * 2 - b, x * 1.0, y, use_reentrant=True),
            lambda: self._hooked(x * 1.0, index),
            lambda: self._in_place(x),
        ]
        if not self.exact:
            operators += [
                lambda: torch.tanh(x) @ y,
                lambda: torch.sin(x) * torch.sigmoid(y),
                lambda: x.softmax(1),
            ]
        return self.random.choice(operators)()

    def _in_place(self, x: Tensor) -> Tensor:
        z = x * 1.0
        z[0] *= 2
        return z

    def _hooked(self, x: Tensor, index: int) -> Tensor:
        match self.random.randrange(4):
            case 0:
                x.register_hook(lambda gradient: self._note(f"tensor {index}") or gradient * 2)
            case 1:
                x.grad_fn.register_hook(lambda made, received: self._note(f"node {index}"))
            case 2:
                x.grad_fn.register_prehook(lambda received: self._note(f"before {index}"))
            case _:
                x.retain_grad()
                self.retained.append(x)
        return x

    def _note(self, event: str) -> None:
        self.log.append(event)


def build_step(seed: int, *, exact: bool = False, fault: bool = False) -> Step:
    """The same seed builds the same step, with tensors and nodes of its own."""
    return _Builder(seed, exact=exact, fault=fault).build()


@pytest.fixture(scope="session")
def random_step() -> Callable[..., Step]:
    """:func:`build_step`, for test files."""
    return build_step


@pytest.fixture(scope="session")
def injected_error() -> type[Exception]:
    """The error that faulty steps raise."""
    return InjectedError


@contextmanager
def _watched() -> Iterator[None]:
    """End the process, with the stacks of all threads, when the block takes two minutes."""
    faulthandler.dump_traceback_later(120, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def watchdog() -> Callable[[], AbstractContextManager[None]]:
    """A block that hangs, whatever locks it holds, ends its process; one that fails leaves nothing behind."""
    return _watched


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Split]:
    """The cuts along which passes were run in this test, which begins without memories."""
    seen: list[Split] = []
    run_all = threaded._Parts.run_all

    def noted(self: Any, split: Split, *rest: Any) -> None:
        seen.append(split)
        run_all(self, split, *rest)

    monkeypatch.setattr(threaded, "_memory", Memory(threaded._Known))
    monkeypatch.setattr(threaded._Parts, "run_all", noted)
    return seen
