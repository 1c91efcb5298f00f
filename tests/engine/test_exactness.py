"""``scrimp.backward`` does what ``loss.backward()`` does, bit by bit, on random graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import scrimp

pytestmark = pytest.mark.filterwarnings("ignore:.*reentrant:UserWarning", "ignore:None of the inputs have:UserWarning")


def assert_same_gradients(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    """The same gradients exist and have the same bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.dtype == other.dtype and torch.equal(mine, other))


def test_assert_same_gradients_fails_on_other_bits() -> None:
    """The comparison sees one unit in the last place, and a missing gradient."""
    one = torch.ones(2)
    with pytest.raises(AssertionError):
        assert_same_gradients([one], [torch.nextafter(one, one + 1)])
    with pytest.raises(AssertionError):
        assert_same_gradients([one], [None])


def outcome(run: Callable[[], object]) -> str:
    """What became of a backward pass: nothing, or its error."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.slow)], ids=["200", "1000"]
)
def test_torch_order_is_bit_identical(seeds: range, random_step: Callable[..., Any]) -> None:
    """On 1,000 random graphs gradients, retained gradients and the sequence of hooks are those of PyTorch."""
    for seed in seeds:
        theirs, ours = random_step(seed), random_step(seed)
        theirs.loss.backward()
        scrimp.backward(ours.loss)
        assert_same_gradients(ours.gradients(), theirs.gradients())
        assert ours.log == theirs.log


@pytest.mark.parametrize("order", ["depth-first", "memory", lambda node: len(node.name())])
def test_every_order_has_the_exact_gradient(order: Any, random_step: Callable[..., Any]) -> None:
    """Where sums are exact (small integers), the order makes no difference at all."""
    for seed in range(120):
        theirs, ours = random_step(seed, exact=True), random_step(seed, exact=True)
        theirs.loss.backward()
        scrimp.backward(ours.loss, order=order)
        assert_same_gradients(ours.gradients(), theirs.gradients())
        assert sorted(ours.log) == sorted(theirs.log)


@pytest.mark.parametrize("order", ["depth-first", "memory"])
def test_an_order_is_the_same_in_every_run(order: Any, random_step: Callable[..., Any]) -> None:
    """Two runs of one graph have the same bits and call hooks in the same sequence."""
    for seed in range(50):
        first, second = random_step(seed), random_step(seed)
        scrimp.backward(first.loss, order=order)
        scrimp.backward(second.loss, order=order)
        assert_same_gradients(first.gradients(), second.gradients())
        assert first.log == second.log


def test_observers_and_leaf_reports_change_no_bit(random_step: Callable[..., Any]) -> None:
    """Gradients are PyTorch's with every hook of ours in place."""
    for seed in range(100):
        theirs, ours = random_step(seed), random_step(seed)
        theirs.loss.backward()
        reported: list[Tensor] = []
        scrimp.backward(
            ours.loss,
            observer=scrimp.Profile(),
            on_leaf_grad_ready=lambda leaf, _, to=reported: to.append(leaf),
        )
        assert_same_gradients(ours.gradients(), theirs.gradients())
        assert {id(leaf) for leaf in reported} == {id(leaf) for leaf in ours.leaves if leaf.grad is not None}
        assert len(reported) == len({id(leaf) for leaf in reported})


@pytest.mark.parametrize("order", ["torch", "depth-first"])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 250), marks=pytest.mark.slow)], ids=["120", "1000"]
)
def test_a_fault_surfaces_once_and_leaves_nothing(
    seeds: range, order: Any, observed: bool, random_step: Callable[..., Any], watchdog: Callable[..., Any]
) -> None:
    """1,000 errors injected into nodes and hooks (250 for each case) end the pass; the next one works.

    Each runs under a watchdog that ends the process when the pass hangs.
    """
    threads = threading.active_count()
    raised = 0
    for seed in seeds:
        with watchdog():
            faulty = random_step(seed, fault=True)
            numbers = _numbers(faulty.loss)
            plain = outcome(lambda seed=seed: random_step(seed, fault=True).loss.backward())
            ours = outcome(
                lambda step=faulty: scrimp.backward(
                    step.loss, order=order, observer=scrimp.Profile() if observed else None
                )
            )
            assert ours == plain
            assert _numbers(faulty.loss) == numbers
            raised += plain != "done"
    assert raised == len(seeds)
    assert threading.active_count() == threads
    after = random_step(0)
    scrimp.backward(after.loss)
    assert after.gradients()[0] is not None


def _numbers(loss: Tensor) -> list[int]:
    """The engine's sequence numbers of all nodes."""
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    numbers = []
    while waiting:
        node = waiting.pop()
        numbers.append(node._sequence_nr())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return numbers
