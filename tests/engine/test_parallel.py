"""``scrimp.parallel`` does what the serial line does, bit by bit, from threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scrimp

Branch = Callable[..., Any]


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


def test_branches_run_at_the_same_time() -> None:
    """Two branches that wait for each other both finish, forward and backward."""
    barrier = threading.Barrier(2, timeout=20)

    def meet(_: Tensor) -> None:
        barrier.wait()

    def branch(x: Tensor) -> Tensor:
        barrier.wait()
        y = x * 2
        y.register_hook(meet)
        return y

    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([branch, branch], x, workers=2)
    (first + second).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 4.0))


def test_branches_are_one_node_of_the_outer_graph() -> None:
    """What the branches return comes from a single node."""
    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([torch.sin, torch.cos], x, workers=2)
    assert first.grad_fn is second.grad_fn


def test_autograd_grad_and_retain_graph_work() -> None:
    """``torch.autograd.grad`` finds parameters behind the node, and a retained graph can be run again."""
    x, w = torch.randn(3, 3).requires_grad_(), torch.randn(3, 3).requires_grad_()
    loss = sum(scrimp.parallel([lambda x: (x @ w).sum(), lambda x: (x * w).sum()], x, workers=2))
    plain = (x @ w).sum() + (x * w).sum()
    expected = torch.autograd.grad(plain, [x, w])
    assert_same_outcome(list(torch.autograd.grad(loss, [x, w], retain_graph=True)), list(expected))
    assert_same_outcome(list(torch.autograd.grad(loss, [x, w])), list(expected))
    with pytest.raises(scrimp.errors.GraphFreedError):
        scrimp.backward(loss)


def test_nothing_is_recorded_without_grad() -> None:
    """Under ``torch.no_grad`` the branches' results have no history."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        results = scrimp.parallel([torch.sin, lambda x: torch.is_grad_enabled()], x, workers=2)
    assert results[0].grad_fn is None
    assert results[1] is False


class CountingDispatch(TorchDispatchMode):
    """Notes the threads in which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the thread."""
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


class PlainFunctionMode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        CountingDispatch,
        PlainFunctionMode,
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.set_multithreading_enabled(False),
    ],
)
def test_branches_run_plainly_where_something_follows_one_thread(mode: Any) -> None:
    """Modes and saved-tensor hooks see operators in sequence: all run in the caller's thread."""
    threads: set[int] = set()
    with mode():
        x = torch.ones(2, requires_grad=True)
        first, second = scrimp.parallel([lambda x: threads.add(threading.get_ident()) or x * 2] * 2, x, workers=2)
    assert threads == {threading.get_ident()}
    assert first.grad_fn is not second.grad_fn


def test_a_dispatch_mode_around_backward_sees_every_operator() -> None:
    """The branches' backward runs in the caller's thread when a mode watches it."""
    x = torch.ones(2, 2, requires_grad=True)
    loss = sum(scrimp.parallel([lambda x: (x @ x).sum(), lambda x: x.exp().sum()], x, workers=2))
    with CountingDispatch() as mode:
        scrimp.backward(loss)
    assert mode.threads == {threading.get_ident()}


def test_random_numbers_in_one_worker_are_the_serial_ones() -> None:
    """With one worker dropout is that of the serial line."""
    torch.manual_seed(0)
    theirs = serially([torch.dropout] * 2, torch.ones(8), 0.5, True)
    torch.manual_seed(0)
    assert_same_outcome(scrimp.parallel([torch.dropout] * 2, torch.ones(8), 0.5, True, workers=1), theirs)


def test_checkpoints_in_branches_leave_the_generator_alone() -> None:
    """Later draws are those of the step without threads."""
    x = torch.ones(4, 4, requires_grad=True)
    branches = [lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum()] * 4
    loss = sum(scrimp.parallel(branches, x, workers=2))
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_an_input_is_not_kept_for_longer_than_without() -> None:
    """An activation that no branch saves dies when its last user is gone."""
    x = torch.ones(4, requires_grad=True) * 2
    storage = weakref.ref(x.untyped_storage())
    results = scrimp.parallel([lambda x: x + 1, lambda x: x + 2], x, workers=2)
    del x
    gc.collect()
    assert storage() is None
    sum(results).sum().backward()


def test_a_branch_without_gradient_is_freed_with_the_others() -> None:
    """What a branch saved whose result is not used dies with the pass, although the loss lives on."""
    x = torch.ones(4, requires_grad=True)
    kept: list[Any] = []

    def unused(x: Tensor) -> Tensor:
        y = x * 2
        kept.append(weakref.ref(y.untyped_storage()))
        return y.square()

    first, second = scrimp.parallel([torch.sin, unused], x, workers=2)
    loss = first.sum()
    del first, second
    loss.backward(retain_graph=True)
    assert kept[0]() is not None
    loss.backward()
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(scrimp.errors.GraphFreedError, match="retain_graph"):
        loss.backward()


def test_a_parallel_inside_a_parallel() -> None:
    """Branches may have branches."""
    x = torch.randn(3, 3, requires_grad=True)

    def run(of: Callable[..., list[Any]]) -> list[Any]:
        x.grad = None
        sum(of([lambda x: sum(of([torch.sin, torch.cos], x)), torch.tanh], x)).sum().backward()
        return [x.grad]

    assert_same_outcome(run(in_threads(2)), run(serially))


def test_a_branch_inside_a_checkpoint_is_recomputed() -> None:
    """Around a checkpoint and inside of it the gradient is the serial one."""
    x = torch.randn(3, 3, requires_grad=True)

    def run(of: Callable[..., list[Any]], reentrant: bool) -> list[Any]:
        x.grad = None
        inner = lambda y: sum(of([torch.sin, torch.cos], y))  # noqa: E731
        checkpoint(inner, x.tanh(), use_reentrant=reentrant).sum().backward()
        return [x.grad]

    for reentrant in (False, True):
        assert_same_outcome(run(in_threads(2), reentrant), run(serially, reentrant))
