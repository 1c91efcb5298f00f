"""Inputs of any kind for ManualChain: buffers, tensors, objects with ``nbytes``, and those that wait in stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import scrimp
from scrimp import ManualChain
from scrimp.errors import (
    BudgetError,
    StoreError,
)
from scrimp.policy import KeepNone

from .layers import LAYERS, plain, run, square_forward


def test_memory_views() -> None:
    """Memory that a solver in another language shares."""

    def flipped(x: memoryview) -> memoryview:
        return memoryview(bytes(one ^ 1 for one in x))

    chain = ManualChain(KeepNone())
    xs = [memoryview(bytearray(b"adjoint"))]
    for layer in range(5):
        xs.append(chain.forward(layer, xs[-1], flipped))
    assert chain.memory_usage == 7
    seen: list[memoryview] = []
    for layer in reversed(range(5)):
        chain.backward(layer, None, flipped, lambda x, _: seen.append(x))
    assert seen == xs[-2::-1]


@pytest.mark.parametrize("store", [False, True])
def test_tensors(store: bool) -> None:
    """Tensors, whose derivatives are written by hand too."""
    chain = ManualChain(budget=45, store=scrimp.store.Host() if store else None)
    xs = [torch.linspace(0, 1, 5)]
    for layer in range(6):
        xs.append(chain.forward(layer, xs[-1], torch.sin))
    seen: list[torch.Tensor] = []
    for layer in reversed(range(6)):
        chain.backward(layer, None, torch.sin, lambda x, _: seen.append(x))
    assert all(map(torch.equal, seen, reversed(xs[:-1])))
    assert (chain.statistics().replayed_operators == 0) is store


def test_any_object_with_nbytes_will_do() -> None:
    """Types of one's own, even without weak references."""

    class Number:
        __slots__ = ("value",)
        nbytes = 8

        def __init__(self, value: float) -> None:
            self.value = value

    chain = ManualChain(KeepNone())
    x = Number(3.0)
    for layer in range(3):
        x = chain.forward(layer, x, lambda one: Number(one.value**2))
    grad = 1.0
    for layer in reversed(range(3)):
        grad = chain.backward(layer, grad, lambda one: Number(one.value**2), lambda one, grad: 2 * one.value * grad)
    assert grad == 8 * 3.0**7


@pytest.mark.parametrize("budget", [1, 130])
@pytest.mark.parametrize("disk", [False, True])
def test_inputs_wait_in_a_store(budget: int, disk: bool, tmp_path: Path) -> None:
    """What the budget has no room for goes into the store, and nothing is computed again."""
    store = scrimp.store.Disk(tmp_path) if disk else scrimp.store.Host()
    chain = ManualChain(budget=budget, store=store)
    assert np.array_equal(run(chain), plain())
    statistics = chain.statistics()
    assert statistics.kept.peak_bytes <= budget
    assert statistics.stored.peak_bytes >= (LAYERS - 3) * 40
    assert statistics.replayed_operators == 0
    assert store.statistics.held.bytes == 0


def test_a_full_store_is_filled_and_the_rest_is_computed_again() -> None:
    """Budget and store together."""
    store = scrimp.store.Host(100)
    chain = ManualChain(budget=90, store=store)
    assert np.array_equal(run(chain), plain())
    assert chain.statistics().stored.peak_bytes == 80
    assert chain.statistics().replayed_operators > 0


def test_layouts_come_back_from_a_store() -> None:
    """Columns first stays columns first; what is not one piece of memory is computed again."""
    chain = ManualChain(budget=1, store=scrimp.store.Host())
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    chain.forward("fortran", x, square_forward)
    seen: list[np.ndarray] = []
    chain.backward("fortran", x, square_forward, lambda x, grad: seen.append(x))
    assert np.array_equal(seen[0], x)
    assert seen[0].strides == x.strides
    with pytest.raises(BudgetError):
        chain.forward("strided", np.arange(12.0)[::2], square_forward)


def test_a_lost_copy_is_computed_again() -> None:
    """A store of one's own that loses what it was given."""

    class Copy:
        def __init__(self, x: np.ndarray, lost: bool) -> None:
            self.x, self.lost = x, lost

        def fetch(self) -> np.ndarray:
            if self.lost:
                raise StoreError("lost")
            return self.x

        def discard(self) -> None:
            pass

    class Losing:
        taken = 0

        def put(self, x: np.ndarray) -> Copy:
            self.taken += 1
            return Copy(x, lost=self.taken > 1)

    chain = ManualChain(budget=1, store=Losing())
    assert np.array_equal(run(chain), plain())
    assert chain.statistics().replayed_operators > 0
