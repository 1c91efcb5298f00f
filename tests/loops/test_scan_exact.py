"""``scrimp.scan`` has the bits of the plain loop: results, gradients, buffers and random generators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp.testing import Step, assert_same_outcome

Scan = Callable[..., Any]
Maker = Callable[[Scan], Step]


class Cell(nn.Module):
    """A recurrent cell that uses each parameter, and its state, more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(3, 5)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        h = torch.tanh(self.inner(h) * torch.sigmoid(self.inner(h + 0.1)) + self.outer(x) + 0.3 * h)
        return h, h * self.inner.weight.sum()


def cell(scan: Scan) -> Step:
    """Parameters of a module that the step closes over."""
    model, h, xs = Cell(), torch.randn(4, 5), torch.randn(13, 4, 3)
    return Step(lambda: scan(model, h, xs), state=model)


def every_leaf(scan: Scan) -> Step:
    """Gradients of the state and of xs, which are not leaves of the graph."""
    model = Cell()
    h, xs = torch.randn(4, 5, requires_grad=True), torch.randn(11, 4, 3, requires_grad=True)
    return Step(lambda: scan(model, h.sin(), xs * 2), state=(model, h, xs))


def aliases(scan: Scan) -> Step:
    """A state that is an output too, two parts of the state that are one tensor, and one that is passed through."""
    w, h, c = (torch.randn(3, requires_grad=True) for _ in range(3))

    def step(state: Any, _: None) -> Any:
        a, b, c = state
        h = (a * w).sin() * b + (a * 0.3) * c + b * w
        return (h, h, c), (h, None)

    return Step(lambda: scan(step, (h * 1, h * 2, c), length=9), state=(w, h, c))


def rnn_with_lstm_state(scan: Scan) -> Step:
    """torch.nn.LSTMCell: a pair as state."""
    model, xs = nn.LSTMCell(3, 6), torch.randn(17, 2, 3, requires_grad=True)

    def step(state: Any, x: Any) -> Any:
        h, c = model(x["in"], state)
        return (h, c), {"h": h, "norm": c.square().sum()}

    zeros = torch.zeros(2, 6)
    return Step(lambda: scan(step, (zeros, zeros), {"in": xs}), state=(model, xs))


def closed_over_history(scan: Scan) -> Step:
    """Tensors from outside that are not leaves, beside the leaf that they come from."""
    p, h = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    def forward() -> Any:
        a = F.softplus(p)
        b = a.view(2, 2)

        def step(h: Tensor, _: None) -> Any:
            h = torch.sin(h * a + p * (b @ b).view(4)) + a
            return h, h.sum()

        return scan(step, h, length=8)

    return Step(forward, state=(p, h))


def hooked_parameter(scan: Scan) -> Step:
    """A hook of a parameter sees the whole gradient, once."""
    w = torch.randn(4, requires_grad=True)
    calls = torch.zeros(())
    w.register_hook(lambda grad: calls.add_(1) and (grad * 0.5))

    def step(h: Tensor, _: None) -> Any:
        h = torch.tanh(h * w + w)
        return h, None

    return Step(lambda: scan(step, torch.ones(4), length=7), state=(w, calls))


def several_parameters_in_and_out(scan: Scan) -> Step:
    """A parameter that is used before the loop, too: the loop's uses come first in its sum."""
    w = torch.randn(6, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        h = torch.tanh(h * w + (w * 0.7) * h)
        return h, h

    return Step(lambda: scan(step, (w * 3).sin(), length=12), state=w)


def dropout(scan: Scan) -> Step:
    """The default generator."""
    model, h = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()), torch.randn(3, 6)

    def step(h: Tensor, _: None) -> Any:
        h = model(h) + 0.1 * torch.rand_like(h)
        return h, h.mean()

    return Step(lambda: scan(step, h, length=10), state=model)


def own_generators(scan: Scan) -> Step:
    """A generator of one's own that is used from the third step on, Python's, and NumPy's."""
    generator, w = torch.Generator().manual_seed(3), torch.randn(5, requires_grad=True)

    def step(state: Any, _: None) -> Any:
        h, i = state
        noise = torch.rand(5, generator=generator) if i >= 2 else torch.ones(5)
        h = torch.sin(h * w + noise * random.random() + float(np.random.rand()))
        return (h, i + 1), h.sum()

    return Step(lambda: scan(step, (torch.zeros(5), 0), length=9), state=w, generators=[generator])


def batch_norm(scan: Scan) -> Step:
    """Buffers are updated once a step."""
    model, h = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(6, 4)
    return Step(lambda: scan(lambda h, _: (model(h), None), h, length=9), state=model)


def stateful_buffer(scan: Scan) -> Step:
    """A buffer that steps write and read: the power iteration of spectral norm."""
    model, h = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(6, 4)
    return Step(lambda: scan(lambda h, _: (model(h).sin(), h.sum()), h, length=9), state=model)


def branches(scan: Scan) -> Step:
    """Parameters that only some steps use, and a state that does not require grad at first."""
    weights = [torch.randn(4, requires_grad=True) for _ in range(3)]

    def step(state: Any, x: Tensor) -> Any:
        h, i = state
        h = (h * weights[i % 3]).sin() if i >= 2 else h + x
        return (h, i + 1), h

    xs = torch.randn(10, 4)
    return Step(lambda: scan(step, (torch.ones(4), 0), xs), state=weights)


def inner_gradient(scan: Scan) -> Step:
    """A step that differentiates: a leapfrog step along a force that is a gradient."""
    mass, q = torch.rand(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def step(state: Any, _: None) -> Any:
        q, p = state
        if not q.requires_grad:
            q = q.requires_grad_()
        (force,) = torch.autograd.grad((q.cos() * mass).sum(), q, create_graph=True)
        p = p - 0.1 * force
        return (q + 0.1 * p * mass, p), (p * p * mass).sum()

    return Step(lambda: scan(step, (q * 1, torch.zeros(3)), length=8), state=(mass, q))


def nested(scan: Scan) -> Step:
    """A loop in a loop."""
    w, h = torch.randn(4, requires_grad=True), torch.randn(4)

    def inner(h: Tensor, _: None) -> Any:
        h = torch.sin(h * w)
        return h, h

    def outer(h: Tensor, _: None) -> Any:
        h, ys = scan(inner, h, length=4)
        return h + ys.mean(0), ys.sum()

    return Step(lambda: scan(outer, h, length=5), state=w)


def sparse_embedding(scan: Scan) -> Step:
    """Sparse gradients."""
    table = nn.Embedding(7, 4, sparse=True)
    xs = torch.randint(7, (6, 3))
    return Step(lambda: scan(lambda h, x: ((h + table(x)).sin(), None), torch.zeros(3, 4), xs), state=table)


def complex_state(scan: Scan) -> Step:
    """Complex numbers."""
    w = torch.randn(4, dtype=torch.complex64, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        h = h * w / (1 + h.abs()) + h.conj()
        return h, h.abs().sum()

    return Step(lambda: scan(step, torch.ones(4, dtype=torch.complex64), length=6), state=w)


def only_outputs(scan: Scan) -> Step:
    """Nothing depends on the final state."""
    w = torch.randn(4, requires_grad=True)
    return Step(lambda: scan(lambda h, _: ((h * w).sin(), (h * w).cos()), torch.ones(4), length=6)[1][3].sum(), state=w)


class Square(torch.autograd.Function):
    """A custom Function that closes over nothing and is given a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """x² w."""
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Its derivative."""
        x, w = ctx.saved_tensors
        return 2 * x * w * grad, x * x * grad


def custom_function(scan: Scan) -> Step:
    """A custom Function in the step."""
    w, h = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    return Step(lambda: scan(lambda h, _: (Square.apply(h, w).sin() + w, None), h * 1, length=6), state=(w, h))


CASES: list[Maker] = [
    cell, every_leaf, aliases, rnn_with_lstm_state, closed_over_history, hooked_parameter,
    several_parameters_in_and_out, dropout, own_generators, batch_norm, stateful_buffer, branches, inner_gradient,
    nested, sparse_embedding, complex_state, only_outputs, custom_function,
]  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bits_are_those_of_the_plain_loop(make: Maker, plain: Scan) -> None:
    """Results, every gradient, every buffer and the next draw of every generator, for many numbers of kept states."""
    ways = [{"slots": 1}, {"slots": 2}, {"slots": 3}, {"slots": 100}, {}]
    assert_same_outcome(
        lambda: make(plain),
        *(lambda way=way: make(lambda *args, **kwargs: scrimp.scan(*args, **kwargs, **way)) for way in ways),
    )


@pytest.mark.parametrize("make", [cell, aliases, own_generators, stateful_buffer], ids=lambda make: make.__name__)
def test_a_loop_that_ends_by_itself_has_the_same_bits(make: Maker, plain: Scan) -> None:
    """``until`` keeps states without knowing how many steps will come."""

    def scan(step: Any, state: Any, xs: Any = None, length: int | None = None) -> Any:
        return scrimp.scan(step, state, xs, length, until=lambda _: False, slots=3)

    assert_same_outcome(lambda: make(plain), lambda: make(scan))


@pytest.mark.parametrize("make", [cell, dropout, batch_norm, closed_over_history], ids=lambda make: make.__name__)
def test_within_a_session_the_bits_are_the_same(make: Maker, plain: Scan) -> None:
    """A session around the loop, and one within each step."""

    def around(*args: Any, **kwargs: Any) -> Any:
        with scrimp.session(scrimp.policy.KeepNone()):
            return scrimp.scan(*args, **kwargs, slots=2)

    def within(step: Any, *args: Any, **kwargs: Any) -> Any:
        return scrimp.scan(lambda *one: scrimp.checkpoint(step, *one), *args, **kwargs, slots=2)

    assert_same_outcome(lambda: make(plain), lambda: make(around), lambda: make(within))


def test_backward_may_run_under_other_settings(plain: Scan) -> None:
    """Autocast and the default type in backward do not change what a step computes again."""

    def make(scan: Scan) -> Step:
        model, h = Cell(), torch.randn(4, 5)
        xs = torch.randn(7, 4, 3)

        def forward() -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                return scan(model, h, xs)

        def backward(results: Any) -> None:
            with torch.autocast("cpu", dtype=torch.float16):
                (results[0].float().sum() + results[1].float().sum()).backward()

        return Step(forward, state=model, backward=backward)

    assert_same_outcome(lambda: make(plain), lambda: make(lambda *a, **k: scrimp.scan(*a, **k, slots=2)))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_backward_may_run_in_another_thread(make: Maker, plain: Scan) -> None:
    """As on a GPU, where autograd's engine has a thread of its own, which numbers the nodes of graphs on its own."""

    def elsewhere(scan: Scan) -> Step:
        step = make(scan)

        def forward() -> Any:
            w = torch.ones(1, requires_grad=True)
            for _ in range(1000):
                w * 2  # nodes of this thread have higher numbers from here on than any of the other one's
            return step.forward()

        def backward(results: Any) -> None:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(step.backward, results).result()

        return dataclasses.replace(step, forward=forward, backward=backward)

    ways = (plain, lambda *a, **k: scrimp.scan(*a, **k, slots=3))
    assert_same_outcome(*(lambda way=way: elsewhere(way) for way in ways))


def test_graph_can_be_kept(plain: Scan) -> None:
    """Two passes over one graph add up as in the plain loop; a third one, over a freed graph, is an error."""

    def make(scan: Scan) -> Step:
        model, h, xs = Cell(), torch.randn(4, 5, requires_grad=True), torch.randn(9, 4, 3)

        def backward(results: Any) -> None:
            loss = results[0].sum() + results[1].square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()

        return Step(lambda: scan(model, h, xs), state=(model, h), backward=backward)

    assert_same_outcome(lambda: make(plain), lambda: make(lambda *a, **k: scrimp.scan(*a, **k, slots=3)))


def test_without_gradients_it_is_a_plain_loop(plain: Scan) -> None:
    """Under no_grad results are the same, and nothing is kept."""
    model, h, xs = Cell(), torch.randn(4, 5), torch.randn(9, 4, 3)
    with torch.no_grad():
        ours, theirs = scrimp.scan(model, h, xs), plain(model, h, xs)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert not ours[0].requires_grad


def test_until_ends_the_loop() -> None:
    """The condition is asked before each step, of the state; length bounds the number of steps."""
    w = torch.tensor(0.5, requires_grad=True)
    asked = []

    def until(h: Tensor) -> Tensor:
        asked.append(float(h))
        return h < 0.2

    h, ys = scrimp.scan(lambda h, _: (h * w, h), torch.tensor(1.0), until=until, slots=2)
    assert asked == [1.0, 0.5, 0.25, 0.125]
    assert ys.tolist() == [1.0, 0.5, 0.25]
    h.backward()
    assert w.grad == 3 * 0.5**2
    h, ys = scrimp.scan(lambda h, _: (h * w, h), torch.tensor(1.0), length=2, until=until, slots=2)
    assert len(ys) == 2
    h, ys = scrimp.scan(lambda h, _: (h * w, h), torch.tensor(0.1), until=until, slots=2)
    assert (float(h), ys) == (float(torch.tensor(0.1)), None)


def test_no_steps() -> None:
    """A loop of no steps returns its state."""
    h = torch.ones(3, requires_grad=True)
    state, ys = scrimp.scan(lambda h, _: (h, h), h, length=0)
    assert state is h
    assert ys is None
