"""States of ``scrimp.scan`` that wait in host memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp._loops.schedule import advances
from scrimp.errors import BudgetError
from scrimp.testing import Step, assert_same_outcome, live_bytes

STATE = 4 * 1000
Scan = Callable[..., Any]


def make(scan: Scan) -> Step:
    """Tensors that are one, a view, a number, and random numbers."""
    w = torch.randn(6, requires_grad=True)

    def step(state: Any, _: None) -> Any:
        a, b, c, i = state
        h = (a * w + b * torch.rand(6)).sin()
        return (h, h, h.view(2, 3).t() + c * 0.5, i + 1), h.sum()

    return Step(lambda: scan(step, (w * 1, w * 2, torch.zeros(3, 2), 0), length=23), state=w)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("until", [None, lambda _: False], ids=["known", "unknown"])
def test_bits_are_those_of_the_plain_loop(plain: Scan, slots: int, until: Any, tmp_path: Path) -> None:
    """Wherever the states wait."""

    def tiers(host: Any, disk: bool) -> Callable[[], Step]:
        store = scrimp.store.Disk(tmp_path) if disk else None
        return lambda: make(lambda *a, **k: scrimp.scan(*a, **k, slots=slots, host=host, disk=store, until=until))

    assert_same_outcome(lambda: make(plain), tiers("1kB", False), tiers(None, True), tiers(200, True))


def run(length: int, **ways: Any) -> tuple[int, int]:
    """A loop, forward and backward: how many steps ran, and the peak of live bytes."""
    calls = 0
    w, h = torch.ones(1000, requires_grad=True), torch.rand(1000)

    def step(h: Tensor, _: None) -> Any:
        nonlocal calls
        calls += 1
        return (h * w).sin(), None

    with live_bytes() as count:
        last, _ = scrimp.scan(step, h, length=length, **ways)
        last.sum().backward()
        del last
        w.grad = None
    assert count.now == 0
    return calls, count.peak


def test_slots_of_all_tiers_add_up(tmp_path: Path) -> None:
    """Steps run as often as with so many states in one place, and the store is empty afterwards."""
    host = scrimp.store.Host(4 * STATE)
    disk = scrimp.store.Disk(tmp_path, 2 * STATE)
    calls, _ = run(60, budget=3 * STATE, host=host, disk=disk)
    assert calls == 60 + 60 + advances(60, 3 + 4 + 2) - 59
    assert host.statistics.held.bytes == disk.statistics.held.bytes == 0
    assert host.statistics.held.peak_bytes == 4 * STATE
    assert disk.statistics.held.count == 0


def test_all_states_in_a_store_run_each_step_twice() -> None:
    """Without a limit nothing is run more than once again."""
    assert run(50, host=scrimp.store.Host())[0] == 100


def test_a_kept_graph_keeps_what_is_stored() -> None:
    """retain_graph leaves the stored states in their store, for the next pass; they go with the graph."""
    host, w = scrimp.store.Host(), torch.ones(1000, requires_grad=True)
    last, _ = scrimp.scan(lambda h, _: ((h * w).sin(), None), torch.ones(1000), length=20, slots=2, host=host)
    stored = host.statistics.held.bytes
    (first,) = torch.autograd.grad(last.sum(), w, retain_graph=True)
    assert host.statistics.held.bytes == stored > 0
    (second,) = torch.autograd.grad(last.sum(), w)
    assert torch.equal(first, second)
    assert host.statistics.held.bytes == 0


def test_a_store_that_something_else_fills() -> None:
    """An error that says so."""
    host, w = scrimp.store.Host(4 * STATE), torch.ones(1000, requires_grad=True)
    taken = host.put(torch.zeros(3 * STATE, dtype=torch.uint8))
    with pytest.raises(BudgetError, match="stores of its own"):
        scrimp.scan(lambda h, _: ((h * w).sin(), None), torch.ones(1000), length=20, slots=1, host=host)
    assert taken is not None
    taken.discard()
