"""What ``scrimp.scan`` cannot be given, nor steps return; and what is left when it fails or is interrupted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import (
    BudgetError,
    GraphFreedError,
    LoopError,
    OrderError,
    StoreError,
)
from scrimp.testing import live_bytes


def scaled(w: Tensor) -> Any:
    """A step."""
    return lambda h, _: ((h * w).sin(), None)


@pytest.fixture
def w() -> Tensor:
    """A parameter."""
    return torch.full((3,), 0.9, requires_grad=True)


def test_a_failed_backward_frees_what_it_would_not_keep(w: Tensor) -> None:
    """As plain autograd does: another pass says that the graph is freed; with retain_graph it can be run again."""
    calls = 0

    def step(h: Tensor, _: None) -> Any:
        nonlocal calls
        calls += 1
        if calls in (8, 20):
            raise ValueError("in the step")
        return (h * w).sin(), None

    for retain in (False, True):
        h, _ = scrimp.scan(step, torch.ones(3), length=6, slots=2)
        with pytest.raises(ValueError, match="in the step"):
            h.sum().backward(retain_graph=retain)
        if retain:
            h.sum().backward()
        else:
            with pytest.raises(GraphFreedError):
                h.sum().backward()
            calls = 12
    assert w.grad is not None


def test_second_derivatives(w: Tensor) -> None:
    """First ones come with create_graph=True too; to differentiate them is an error of ours."""
    h, _ = scrimp.scan(scaled(w), torch.ones(3), length=4, slots=2)
    (first,) = torch.autograd.grad(h.sum(), w, create_graph=True)
    plain = torch.ones(3)
    for _ in range(4):
        plain = (plain * w).sin()
    assert torch.equal(first, torch.autograd.grad(plain.sum(), w)[0])
    with pytest.raises(OrderError, match="scan"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, LoopError, "length="),
        ({"length": -1}, LoopError, "0 or more"),
        ({"xs": torch.ones(3), "length": 4}, LoopError, "slices"),
        ({"xs": [torch.ones(3), torch.ones(4)]}, LoopError, "one length"),
        ({"xs": [1.0]}, LoopError, "wrap numbers"),
        ({"length": 3, "slots": 0}, BudgetError, "1 or more"),
        ({"length": 3, "slots": 2, "budget": "1MB"}, BudgetError, "not both"),
        ({"length": 9, "budget": 3}, BudgetError, "raise it"),
        ({"until": lambda h: False}, BudgetError, "slots="),
        ({"length": 3, "disk": "200GiB"}, StoreError, "Disk\\(path"),
    ],
)
def test_arguments(w: Tensor, arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    """What cannot work is refused, with what would."""
    with pytest.raises(error, match=says):
        scrimp.scan(scaled(w), torch.ones(3), **arguments)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda h, _: h, "two things"),
        (lambda h, _: ((h, h), None), "built like"),
        (lambda h, _: (h, 1.0), "outputs"),
        (lambda h, _: (object(), None), "holds"),
    ],
)
def test_results_of_a_step(step: Any, says: str) -> None:
    """What a step returns must be two things, built as the state is and as outputs can be."""
    with pytest.raises(LoopError, match=says):
        scrimp.scan(step, torch.ones(3), length=2)


def test_outputs_that_cannot_be_stacked(w: Tensor) -> None:
    """Shapes of outputs must be alike."""
    with pytest.raises(LoopError, match="alike"):
        scrimp.scan(lambda i, _: (i + 1, torch.ones(i + 1)), 0, length=3)


@pytest.mark.parametrize("at", [3, 11, 14, 20])
@pytest.mark.parametrize("retain", [False, True])
def test_an_interrupt_leaves_nothing_behind(at: int, retain: bool) -> None:
    """Ctrl-C in any step: memory, generators, buffers and settings are as if backward had not begun."""
    torch.manual_seed(0)
    model, calls = nn.BatchNorm1d(4), 0
    w = torch.ones(4, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return (model(h) * w + torch.rand_like(h)), None

    with live_bytes() as count:
        h = None
        try:
            h, _ = scrimp.scan(step, torch.randn(5, 4), length=8, slots=2)
            before = torch.get_rng_state(), model.running_mean.clone()
            h.sum().backward(retain_graph=retain)
        except KeyboardInterrupt:
            pass
        if at > 8:
            assert torch.equal(torch.get_rng_state(), before[0])
            assert torch.equal(model.running_mean, before[1])
        assert w.grad is None
        del h
        before = None
    assert count.now == 0
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()


def test_threads_do_not_meet() -> None:
    """Loops in many threads, forward and backward."""
    results: dict[int, Tensor] = {}

    def run(number: int) -> None:
        w = torch.full((3,), 0.5 + number / 10, requires_grad=True)
        h, _ = scrimp.scan(scaled(w), torch.ones(3), length=20, slots=3)
        h.sum().backward()
        results[number] = w.grad

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        w = torch.full((3,), 0.5 + number / 10, requires_grad=True)
        h = torch.ones(3)
        for _ in range(20):
            h = (h * w).sin()
        h.sum().backward()
        assert torch.equal(results[number], w.grad)
