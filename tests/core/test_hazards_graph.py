"""Backward again and double backward, hooks, exceptions, and what is left when graphs go."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import SessionError
from scrimp.policy import EveryN, KeepNone


def chain(x: Tensor) -> Tensor:
    """A few operators that save their inputs or results."""
    return (x.sin().exp() * x.cos()).tanh().sigmoid()


def test_repeated_partial_gradients_do_not_grow() -> None:
    """Twenty passes with ``retain_graph`` give the same bits, and each leaves nothing behind that was dropped."""
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    with scrimp.session(KeepNone()) as session:
        y = chain(x)
    plain = torch.autograd.grad(chain(x).sum(), x)[0]
    held = set()
    for _ in range(20):
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(gradient, plain)
        held.add((session.statistics.kept.bytes, session.statistics.dropped.bytes))
    assert len(held) == 1
    assert held.pop()[0] == 0
    del y
    assert session.statistics.made.bytes == 0


def test_gradients_of_intermediates() -> None:
    """``autograd.grad`` with respect to a value in the middle of a region."""
    x = torch.randn(10, requires_grad=True)
    with scrimp.session(KeepNone()):
        middle = x.sin()
        y = middle.exp().tanh()
    (ours,) = torch.autograd.grad(y.sum(), middle)
    other = x.sin()
    (plain,) = torch.autograd.grad(other.exp().tanh().sum(), other)
    assert torch.equal(ours, plain)


def test_double_backward() -> None:
    """The graph of the gradient is that of plain autograd."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def second(f: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x)
        return result

    assert torch.equal(second(lambda x: scrimp.checkpoint(chain, x)), second(chain))


def test_gradgradcheck() -> None:
    """First and second derivatives agree with finite differences."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def region(x: Tensor, w: Tensor) -> Tensor:
        return scrimp.checkpoint(lambda x: (chain(x) * w).exp(), x)

    assert torch.autograd.gradcheck(region, (x, w))
    assert torch.autograd.gradgradcheck(region, (x, w))


def test_double_backward_inside_the_session() -> None:
    """What the first backward saves is under the session too."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def run() -> Tensor:
        (first,) = torch.autograd.grad(chain(x).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x)
        return result

    with scrimp.session(KeepNone()):
        ours = run()
    assert torch.equal(ours, run())


def test_two_forwards_before_backward() -> None:
    """Passes of one session that overlap in time do not mix."""
    x, z = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    session = scrimp.session(KeepNone())
    with session:
        first = chain(x)
    with session:
        second = chain(z)
    first.sum().backward()
    second.sum().backward()
    plain = copy.deepcopy((x.detach(), z.detach()))
    for ours, data in zip((x, z), plain, strict=True):
        data.requires_grad_()
        chain(data).sum().backward()
        assert torch.equal(ours.grad, data.grad)
    assert session.statistics.made.bytes == 0


def test_hooks_fire_once() -> None:
    """Module hooks, tensor hooks and Python side effects happen as often as without scrimp."""
    counts = {"module": 0, "full": 0, "tensor": 0, "python": 0}
    layer = nn.Linear(4, 4)

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    layer.register_forward_hook(count("module"))
    layer.register_full_backward_hook(count("full"))

    def region(x: Tensor) -> Tensor:
        counts["python"] += 1
        y = layer(x).relu()
        y.register_hook(count("tensor"))
        return y.exp()

    x = torch.randn(2, 4, requires_grad=True)
    scrimp.checkpoint(region, x).sum().backward()
    assert counts == {"module": 1, "full": 1, "tensor": 1, "python": 1}


def test_input_gradient_accumulates_once() -> None:
    """An input that is used in several places gets each contribution once."""
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 10.0)
    scrimp.checkpoint(lambda a, b: a * b + a, x, x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 13.0))


def test_exception_in_a_region_restores_everything() -> None:
    """After an error inside, operators are not recorded any more and saved tensors are plain."""
    x = torch.randn(3, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        x.exp()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scrimp.checkpoint(fails, x)
    y = x.exp()
    assert y.grad_fn._raw_saved_result is not None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


def test_early_return_and_internal_generators() -> None:
    """Control flow inside the region is its own business."""
    x = torch.randn(3, requires_grad=True)

    def region(x: Tensor, stop: int) -> Tensor:
        def steps() -> Iterator[Tensor]:
            y = x
            while True:
                y = y.sin().exp()
                yield y

        for count, y in enumerate(steps()):
            if count == stop:
                return y
        raise AssertionError

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x, 2).sum(), x)
    (plain,) = torch.autograd.grad(region(x, 2).sum(), x)
    assert torch.equal(ours, plain)


def test_generator_functions_are_refused() -> None:
    """A generator does its work after the region has ended, which cannot help: an error says so."""

    def region(x: Tensor) -> Iterator[Tensor]:
        yield x.exp()

    with pytest.raises(SessionError, match="generator"):
        scrimp.checkpoint(region, torch.ones(2, requires_grad=True))


def test_nothing_of_ours_is_left_after_backward() -> None:
    """Reference counting alone frees every value, with the garbage collector switched off."""
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(100, requires_grad=True)
        with scrimp.session(KeepNone()) as session:
            middle = x.exp()
            storage = weakref.ref(middle.untyped_storage())
            y = middle.sin().tanh()
        del middle
        assert storage() is None
        y.sum().backward()
        assert session.statistics.made.count == session.statistics.kept.count == 0
    finally:
        gc.enable()


def test_a_result_that_the_user_holds_keeps_nothing_else_alive() -> None:
    """Holding a result after backward does not hold what it was computed from."""
    x = torch.randn(100, requires_grad=True)
    with scrimp.session(EveryN(1)) as session:
        middle = x.exp()
        storage = weakref.ref(middle.untyped_storage())
        y = middle.sin()
        y.sum().backward()
        del middle
        assert storage() is None
        assert session.statistics.kept.bytes == 0


def test_graph_that_is_thrown_away_frees_its_values() -> None:
    """Without backward, the last reference to the graph takes everything with it."""
    x = torch.randn(100, requires_grad=True)
    with scrimp.session(EveryN(2)) as session:
        y = chain(x)
    assert session.statistics.made.bytes > 0
    del y
    assert session.statistics.made.bytes == session.statistics.kept.bytes == session.statistics.dropped.bytes == 0


def test_cycles_through_a_mutated_input_are_freed() -> None:
    """An input that is written in the region and so becomes part of its graph is not kept alive by it."""
    data = torch.randn(100)
    storage = weakref.ref(data.untyped_storage())
    w = torch.randn(100, requires_grad=True)
    gc.disable()
    try:
        y = scrimp.checkpoint(lambda d: d.mul_(w).exp().sin(), data)
        del data, y
        assert storage() is None
    finally:
        gc.enable()


def test_accumulation_of_many_steps_is_flat() -> None:
    """Gradient accumulation over one session object holds nothing from step to step."""
    layer = nn.Linear(8, 8)
    session = scrimp.session(KeepNone())
    for _ in range(5):
        with session:
            loss = layer(torch.randn(4, 8)).tanh().sum()
        loss.backward()
        assert session.statistics.made.count == 0
    assert session.statistics.made.total == 10
