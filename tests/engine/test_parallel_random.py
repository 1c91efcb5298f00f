"""Random branches in threads: the bits of the serial line, and its errors."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import scrimp

Branch = Callable[..., Any]


class Cube(torch.autograd.Function):
    """A custom Function; raises in its backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: bool) -> Tensor:
        """Save the input."""
        ctx.save_for_backward(x)
        ctx.fault = fault
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Three times the square, or an error."""
        if ctx.fault:
            raise ArithmeticError("in a branch")
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2, None


class RandomBranches:
    """A step with random branches over shared inputs and parameters; the same seed gives the same step."""

    def __init__(self, seed: int, *, fault: bool = False) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(4)]
        self.log: list[str] = []
        self.leaves[1].register_hook(lambda gradient: self.log.append("hook") or gradient * 1.5)
        self.count = self.random.randint(2, 5)
        self.faulty = self.random.randrange(self.count) if fault else -1
        self.branches = [self._branch(index) for index in range(self.count)]

    def _branch(self, index: int) -> Branch:
        steps = [self.random.randrange(8) for _ in range(self.random.randint(1, 6))]
        weights = [self.random.choice(self.leaves) for _ in steps]
        late = self.random.random() < 0.5

        def branch(x: Tensor, y: Tensor) -> dict[str, Any]:
            if index == self.faulty and not late:
                raise ArithmeticError("in a branch")
            z = x * 1.0
            for step, weight in zip(steps, weights, strict=True):
                z = self._apply(step, z, weight, y)
            if index == self.faulty:
                z = Cube.apply(z, True)
            return {"z": z, "more": (z.sum() * index, x, weights[0], index), "unused": z.sin()}

        return branch

    def _apply(self, step: int, z: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        match step:
            case 0:
                return torch.tanh(z @ weight)
            case 1:
                return z * torch.sigmoid(y) + weight
            case 2:
                return torch.cat([z[:2] * weight[2:], y[:2]])
            case 3:
                return Cube.apply(z.sin(), False)
            case 4:
                return checkpoint(lambda a, b: torch.tanh(a @ b), z, weight, use_reentrant=False)
            case 5:
                first, *others = z.unbind(0)
                return torch.stack([first * 2, *others]).cos()
            case 6:
                copy = z.sin()
                copy[0] *= 2
                return copy + y
            case _:
                return z.softmax(1) * y

    def loss(self, run: Callable[..., list[Any]]) -> Tensor:
        """The forward pass; ``run`` runs the branches."""
        a, b, c, d = self.leaves
        x, y = torch.tanh(a @ b), torch.sin(c)
        results = run(self.branches, x, y)
        loss = (x * 0.5 + y).sum() + d.sum()
        for result in results:
            total, same, weight, index = result["more"]
            loss = loss + (result["z"] * same).sum() + total * 0.1 + (weight * index).mean()
        return loss + (x.square() * results[0]["z"]).sum()

    def outcome(self, run: Callable[..., list[Any]]) -> list[Any]:
        """The loss, gradients and log of a whole step, or its error."""
        try:
            loss = self.loss(run)
            scrimp.backward(loss)
        except ArithmeticError as error:
            return [repr(error), self.log]
        return [loss.detach(), *[leaf.grad for leaf in self.leaves], self.log]


def serially(branches: list[Branch], *inputs: Any) -> list[Any]:
    """What ``parallel`` promises to be equal to."""
    return [branch(*inputs) for branch in branches]


def in_threads(workers: int) -> Callable[..., list[Any]]:
    """``parallel`` with a number of workers."""
    return lambda branches, *inputs: scrimp.parallel(branches, *inputs, workers=workers)


def assert_same_outcome(ours: list[Any], theirs: list[Any]) -> None:
    """Tensors have the same bits, everything else is equal."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


def test_assert_same_outcome_fails_on_other_bits() -> None:
    """The comparison sees one unit in the last place."""
    one = torch.ones(1)
    with pytest.raises(AssertionError):
        assert_same_outcome([one], [torch.nextafter(one, one + 1)])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 600), marks=pytest.mark.slow)], ids=["100", "600"]
)
def test_gradients_are_bit_identical(seeds: range, workers: int, watchdog: Callable[..., Any]) -> None:
    """Loss, gradients and hooks of random branches are those of the serial line."""
    for seed in seeds:
        with watchdog():
            ours = RandomBranches(seed).outcome(in_threads(workers))
            assert_same_outcome(ours, RandomBranches(seed).outcome(serially))


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=["100", "1000"]
)
def test_a_fault_surfaces_once_and_leaves_no_thread(seeds: range, watchdog: Callable[..., Any]) -> None:
    """Errors injected into branches, forward or backward, are those of the serial line; no thread stays.

    Each runs under a watchdog that ends the process when the step hangs.
    """
    threads = threading.active_count()
    for seed in seeds:
        with watchdog():
            theirs = RandomBranches(seed, fault=True).outcome(serially)
            ours = RandomBranches(seed, fault=True).outcome(in_threads(2))
            assert ours[0] == theirs[0] == "ArithmeticError('in a branch')"
            assert threading.active_count() == threads
