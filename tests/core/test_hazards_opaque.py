"""Bytes that the dispatcher does not see being made."""
# ruff: noqa: D102

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import scrimp
from scrimp.policy import KeepNone


class FillsBlankMemory(torch.autograd.Function):
    """Its kernel is NumPy: it writes into memory that the dispatcher believes empty, zero, or a copy of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made_by: str) -> Tensor:
        out = {"empty": torch.empty_like, "zeros": torch.zeros_like, "clone": torch.clone}[made_by](x)
        out.detach().numpy()[:] = 3 * x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 3 * grad, None


class WritesItsInput(torch.autograd.Function):
    """It computes its gradient in forward, in the memory of its input, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        loss = logits.detach().exp().sum()
        memory = logits.detach().numpy()
        memory[:] = logits.detach().exp().numpy()
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return gradient * grad


@pytest.mark.parametrize("made_by", ["empty", "zeros", "clone"])
def test_memory_filled_unseen_is_not_replayed(made_by: str) -> None:
    """What a custom Function returns is kept, since replaying the operators seen in it would give garbage."""
    x = torch.randn(5, requires_grad=True)
    y = scrimp.checkpoint(lambda x: FillsBlankMemory.apply(x.sin(), made_by).exp().tanh(), x)
    y.sum().backward()
    plain = x.detach().clone().requires_grad_()
    FillsBlankMemory.apply(plain.sin(), made_by).exp().tanh().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_a_function_that_writes_its_input_unseen() -> None:
    """What a custom Function saves is kept as it is, not as the operator that made it once left it."""

    def gradient(checkpointed: bool) -> Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            return WritesItsInput.apply(x * 2)

        (scrimp.checkpoint(step, x) if checkpointed else step(x)).backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


class MarksDirty(torch.autograd.Function):
    """It writes to its input unseen, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.detach().numpy()[:] += 1
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_dirty_input_becomes_a_source() -> None:
    """A version that rose without an operator means that nobody can say how to make the bytes again."""

    def gradient(checkpointed: bool) -> Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            return MarksDirty.apply(x * 2).exp().sin()

        (scrimp.checkpoint(step, x) if checkpointed else step(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_operators_of_other_libraries_are_kept() -> None:
    """A custom operator may hide state: here its second run gives something else, and it is not run a second time."""
    calls = iter((1.0, 2.0))

    @torch.library.custom_op("scrimp_tests::unreliable", mutates_args=())
    def unreliable(x: Tensor) -> Tensor:
        return x * next(calls)

    unreliable.register_autograd(lambda ctx, grad: grad)
    x = torch.randn(5, requires_grad=True)
    with scrimp.session(KeepNone()) as session:
        y = unreliable(x.sin()).exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())
    assert session.statistics.made.total == 1


def test_values_made_without_grad_are_sources() -> None:
    """A mask made inside ``no_grad`` is kept rather than replayed."""
    x = torch.randn(5, requires_grad=True)
    with scrimp.session(KeepNone()) as session:
        with torch.no_grad():
            mask = torch.rand(5) > 0.5
        y = (x * mask).exp()
    assert session.statistics.kept.bytes == 5 * mask.element_size()
    y.sum().backward()
    assert torch.equal(x.grad, (x * mask).exp() * mask)


def test_a_mutating_function_of_a_captured_tensor() -> None:
    """A captured tensor that the region itself writes is followed like any other storage."""

    def run(checkpointed: bool) -> list[Tensor]:
        state = torch.zeros(4)
        x = torch.linspace(0, 1, 4, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            first = (x + state).exp()
            with torch.no_grad():
                state.add_(x.detach())
            return first * (x * state).sin()

        (scrimp.checkpoint(step, x) if checkpointed else step(x)).sum().backward()
        assert x.grad is not None
        return [x.grad, state]

    for plain, ours in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, ours)
