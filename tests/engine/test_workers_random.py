"""``scrimp.backward(workers=...)`` on random graphs: PyTorch's bits, and its errors."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

import scrimp
from scrimp._engine.split import Split

pytestmark = pytest.mark.usefixtures("cuts")


class Step:
    """A random trunk, branches over it, and layers behind them; the same seed builds the same step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.parameters: list[Tensor] = []
        self.inner: list[Tensor] = []
        x = torch.randn(3, 4)
        for _ in range(self.random.randrange(3)):
            x = self.layer(x)
        ends = []
        for _ in range(self.random.randint(1, 5)):
            y = x
            for _ in range(self.random.randint(1, 3)):
                y = self.note(y + self.layer(y)) if self.random.random() < 0.5 else self.layer(y)
            ends.append(y)
        together = self.join(ends)
        if self.random.random() < 0.3:
            together = self.note(together + x)
        for _ in range(self.random.randrange(3)):
            together = self.layer(together)
        self.loss = together.square().mean() if self.random.random() < 0.5 else together.sum()

    def note(self, x: Tensor) -> Tensor:
        """Remember an inner tensor, for hooks."""
        if x.requires_grad:
            self.inner.append(x)
        return x

    def parameter(self, *shape: int) -> Tensor:
        """A new leaf, or now and then the latest."""
        if self.parameters and self.random.random() < 0.03 and self.parameters[-1].shape == shape:
            return self.parameters[-1]  # shared by two places
        self.parameters.append(torch.randn(*shape).requires_grad_())
        return self.parameters[-1]

    def layer(self, x: Tensor) -> Tensor:
        """One of several operators with parameters."""
        match self.random.randrange(5):
            case 0:
                y = nn.functional.linear(x, self.parameter(4, 4), self.parameter(4))
            case 1:
                y = (x @ self.parameter(4, 4)).tanh()
            case 2:
                y = nn.functional.layer_norm(x, (4,), self.parameter(4), self.parameter(4))
            case 3:
                y = x.t().contiguous().t() * self.parameter(4).sigmoid()
            case _:
                first, *rest = (x * self.parameter(3, 4)).unbind(0)
                y = torch.stack([self.note(first.sin()), *rest]).softmax(1)
        return self.note(y)

    def join(self, ends: list[Tensor]) -> Tensor:
        """The sum or mean of the branches."""
        match self.random.randrange(3):
            case 0:
                return self.note(sum(ends[1:], ends[0]))
            case 1:
                return self.note(torch.cat(ends).view(len(ends), 3, 4).mean(0))
            case _:
                return self.note(torch.stack(ends).sum(0))

    def hook(self) -> list[tuple[str, int]]:
        """Hook inner tensors in all ways; return what the hooks note."""
        log: list[tuple[str, int]] = []
        for index, tensor in enumerate(self.inner):
            match self.random.randrange(5):
                case 0:
                    tensor.register_hook(lambda gradient, index=index: log.append(("tensor", index)) or gradient * 1.5)
                case 1:
                    tensor.retain_grad()
                case 2:
                    node: Any = tensor.grad_fn
                    node.register_hook(lambda made, received, index=index: log.append(("node", index)))
                case 3:
                    node = tensor.grad_fn
                    node.register_prehook(lambda received, index=index: log.append(("before", index)))
        return log

    def gradients(self) -> list[Tensor | None]:
        """Those of the leaves, then those of tensors that retain theirs."""
        return [tensor.grad for tensor in [*self.parameters, *(t for t in self.inner if t.retains_grad)]]


def assert_same_gradients(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    """The same gradients exist and have the same bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def test_assert_same_gradients_fails_on_other_bits() -> None:
    """The comparison sees one unit in the last place, and a missing gradient."""
    one = torch.ones(2)
    with pytest.raises(AssertionError):
        assert_same_gradients([one], [torch.nextafter(one, one + 1)])
    with pytest.raises(AssertionError):
        assert_same_gradients([one], [None])


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.slow)], ids=["20", "1000"]
)
def test_gradients_are_bit_identical(seeds: range, cuts: list[Split], watchdog: Callable[..., Any]) -> None:
    """Over three steps, the last two in threads where there are branches, and with whatever hooks the last has."""
    for seed in seeds:
        with watchdog():
            for number in range(3):
                ours, theirs = Step(seed), Step(seed)
                logs = [step.hook() if number == 2 else [] for step in (ours, theirs)]
                scrimp.backward(ours.loss, workers=2 + seed % 2)
                theirs.loss.backward()
                assert_same_gradients(ours.gradients(), theirs.gradients())
                assert sorted(logs[0]) == sorted(logs[1]), seed
    assert len(cuts) > len(seeds) * 0.5


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.slow)], ids=["20", "1000"]
)
def test_a_fault_surfaces_once_and_leaves_nothing(
    seeds: range, cuts: list[Split], watchdog: Callable[..., Any]
) -> None:
    """Errors injected into nodes of all parts end the pass; no thread and no hook of ours stays."""
    threads = threading.active_count()
    for seed in seeds:
        with watchdog():
            scrimp.backward(Step(seed).loss, workers=2)
            step = Step(seed)
            at = random.Random(seed).choice([step.loss, *step.inner])
            handle = at.register_hook(lambda _: 1 / 0)
            numbers = _numbers(step.loss)
            with pytest.raises(ZeroDivisionError):
                scrimp.backward(step.loss, retain_graph=True, workers=2)
            handle.remove()
            assert threading.active_count() == threads
            assert _numbers(step.loss) == numbers
            for parameter in step.parameters:
                parameter.grad = None
            theirs = Step(seed)
            step.loss.backward()
            theirs.loss.backward()
            assert_same_gradients(step.gradients(), theirs.gradients())
    assert len(cuts) > len(seeds) * 0.2


def _nodes(loss: Tensor) -> list[Node]:
    found = dict.fromkeys([loss.grad_fn])
    waiting = [loss.grad_fn]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in found:
                found[following] = None
                waiting.append(following)
    return list(found)


def _numbers(loss: Tensor) -> list[int]:
    return [node._sequence_nr() for node in _nodes(loss)]
