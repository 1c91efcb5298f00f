"""The compiler around and inside sessions, sessions in sessions, passes that fail, and what is left behind."""

import functools
import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online, Policy


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler's own
def test_compiled_modules_run_compiled() -> None:
    """A compiled module in a session runs its own kernels; what they make is kept, and backward is exact."""
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def run(*inputs: object) -> Any:
            runs.append(1)
            return graph.forward(*inputs)

        return run

    torch._dynamo.reset()
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = torch.compile(inner, backend=backend)

    def gradient(under: AbstractContextManager[object]) -> Tensor:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        with under:
            y = compiled(x.sin()).exp().sum()
        y.backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(nullcontext())
    assert torch.equal(gradient(scrimp.session(KeepNone())), plain)
    assert len(runs) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler's own
@pytest.mark.parametrize("way", ["checkpoint", "session"])
def test_a_region_in_a_compiled_function_runs_eagerly(way: str) -> None:
    """The compiler leaves a region alone, and what is ours as well."""
    torch._dynamo.reset()
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())

    def step(x: Tensor) -> Tensor:
        y = x.sin()
        if way == "checkpoint":
            return scrimp.checkpoint(module, y).exp().sum()
        with scrimp.session(KeepNone()):
            z = module(y).exp()
        return z.sum()

    def gradient(step: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        step(x).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(torch.compile(step, backend="eager")), gradient(step))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the compiler's own
def test_control_flow_as_an_operator() -> None:
    """``torch.cond`` and its like, which take functions, run in a session as without one."""

    def step(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,))
        return (y.exp() * x).sum()

    x = torch.linspace(-1, 2, 5, requires_grad=True)
    with scrimp.session(KeepNone()):
        loss = step(x)
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(step(x), x)[0])


@pytest.mark.parametrize("policy", [KeepNone(), KeepAll()])
def test_fake_tensors_in_a_session(policy: Policy) -> None:
    """Tensors without data go through beside real ones."""
    fakes = FakeTensorMode()
    x = torch.linspace(-1, 2, 5, requires_grad=True)
    with scrimp.session(policy):
        y = x.sin() * x
        with fakes:
            described = torch.empty(4, 3, requires_grad=True)
            loss = (described @ described.t()).sin().sum()
        y = y.exp().sum()
    with fakes:
        loss.backward()
    assert described.grad is not None
    assert described.grad.shape == (4, 3)
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad((x.sin() * x).exp().sum(), x)[0])


@pytest.mark.parametrize("policy", [KeepNone(), KeepAll(), Online(1 << 30), Online(100), EveryN(2)], ids=repr)
def test_no_garbage_is_left_for_the_collector(policy: Policy) -> None:
    """What a session made goes by reference counting alone."""
    x = torch.randn(50, requires_grad=True)
    for _ in range(2):  # the first one fills caches
        gc.collect()
        gc.disable()
        try:
            with scrimp.session(policy):
                loss = torch.nn.functional.dropout((x.sin() * x).exp(), 0.5).cos().sum()
            loss.backward()
            del loss
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = [one for one in gc.garbage if type(one).__module__.startswith("scrimp")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not ours


def test_an_exception_in_backward_leaves_a_graph_that_can_be_walked() -> None:
    """What was replayed for the pass that failed is not piled up, and goes with the graph."""
    x = torch.randn(1000, requires_grad=True)
    with scrimp.session(KeepNone()) as session:
        y = x.exp()
        z = y.sin().cos().exp()
    failing = [True]

    def fail(gradient: Tensor) -> Tensor:
        if failing[0]:
            raise ArithmeticError
        return gradient

    y.register_hook(fail)
    for _ in range(5):
        with pytest.raises(ArithmeticError):
            z.sum().backward(retain_graph=True)
        assert session.statistics.kept.bytes <= 3 * 4000
    failing[0] = False
    z.sum().backward()
    expected = x.detach().requires_grad_()
    expected.exp().sin().cos().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert session.statistics.kept.bytes == session.statistics.dropped.bytes == 0


def test_sessions_of_all_kinds_in_one_another(random_policy: Callable[..., Any]) -> None:
    """Values cross borders in both directions, some of them overwritten on the other side."""

    def run(first: Any, second: Any, third: Any) -> list[Tensor]:
        torch.manual_seed(0)
        weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        with first():
            a = (x @ weight).sin()
            buffer = torch.zeros(3, 4)
            buffer += a
            with second():
                b = torch.nn.functional.dropout(buffer.exp(), 0.5)
                flat = b.view(-1) * 1
                flat[::2].mul_(2)
                clipped = a.clone()
                clipped.relu_()
                with third():
                    c = (flat.view(3, 4) * clipped).tanh()
                    d = c + a
                    d.mul_(b)
                e = d.sigmoid() * c
            f = (e @ weight.t()).exp()
        with second():
            total = ((f * b).sin() * e).sum() + (f * clipped).sum()
        total.backward(retain_graph=True)
        total.backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad, torch.rand(2)]

    plain = run(nullcontext, nullcontext, nullcontext)
    policies = [KeepNone(), EveryN(2), KeepAll(), Online(0), Online(200), random_policy(1), random_policy(2)]
    for chosen in itertools.product(policies, policies, policies[:3]):
        ours = run(*(functools.partial(scrimp.session, policy) for policy in chosen))
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)), chosen
