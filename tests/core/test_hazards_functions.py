"""Custom autograd Functions of many kinds in small programs; bit for bit against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online
from scrimp.testing import Step, assert_same_step


class KeepsOnContext(Function):
    """Keeps tensors as attributes, where no hook sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Exponential."""
        ctx.y = x.exp()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its derivative."""
        return gradient * ctx.y


class ReturnsView(Function):
    """Returns its input, seen anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Identity."""
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Something else."""
        return gradient * ctx.saved_tensors[0]


class DoesNotMaterialize(Function):
    """Gets None for the gradient of an output that is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Product and sum."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor | None, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of the product only."""
        assert total is None
        assert product is not None
        x, y = ctx.saved_tensors
        return product * y, product * x


class SavesIntermediates(Function):
    """Saves tensors that are neither inputs nor outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A chain."""
        first = x.exp()
        second = first.sin()
        ctx.save_for_backward(first, second)
        return second.cos()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its derivative."""
        first, second = ctx.saved_tensors
        return -gradient * second.sin() * first.cos() * first


class Sorts(Function):
    """Has an output that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices."""
        values, index = x.sort()
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        return values, index

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        """Back to where they were."""
        return torch.zeros_like(gradient).scatter(0, ctx.saved_tensors[0], gradient)


class SetsUpContext(Function):
    """Has a ``setup_context`` of its own, as function transforms ask for."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Two outputs."""
        y = x.exp()
        return y, y.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save an output."""
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        """Of both."""
        (y,) = ctx.saved_tensors
        return first * y + second * y * y.cos()


class WritesToSaved(Function):
    """Its backward computes in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Exponential."""
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """In place."""
        (x,) = ctx.saved_tensors
        return x.exp_().mul_(gradient)


class DifferentiatesInside(Function):
    """Records a graph of its own in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A chain."""
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = (ctx.x.sin() * ctx.x).exp()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Through that graph."""
        return torch.autograd.grad(ctx.y, ctx.x, gradient)[0]


class ScalesInPlace(Function):
    """Writes its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Three times."""
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Three times."""
        return gradient * 3


def functions_of_all_kinds(x: Tensor) -> Tensor:
    """One after the other, with operators between them."""
    y = ReturnsView.apply(KeepsOnContext.apply(x.sin()).exp()).cos()
    y, _ = DoesNotMaterialize.apply(y.exp(), x.cos())
    y = SavesIntermediates.apply(y.tanh()).exp()
    y, index = Sorts.apply(y * x)
    first, second = SetsUpContext.apply((y * x[index]).sin())
    return DifferentiatesInside.apply(first * second.exp()).sin()


def function_that_writes_to_what_it_saved(x: Tensor) -> Tensor:
    """Nobody else may see that."""
    return WritesToSaved.apply(x.sin()).cos() * WritesToSaved.apply(x.sin().cos())


def function_that_writes_its_input(x: Tensor) -> Tensor:
    """What was computed from it before is not changed."""
    y = x.sin()
    z = y + 1
    y = ScalesInPlace.apply(y)
    return y.exp() * z.cos()


PROGRAMS = [functions_of_all_kinds, function_that_writes_to_what_it_saved, function_that_writes_its_input]


@pytest.mark.parametrize("backward_inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_are_exact(program: Callable[[Tensor], Tensor], backward_inside: bool, random_policy: Any) -> None:
    """With everything dropped, with parts dropped, and with everything evicted at once."""

    def make_step() -> Step:
        x = torch.randn(12, requires_grad=True)
        return Step(lambda: program(x), state=x)

    for policy in (KeepNone(), EveryN(2), Online(0), Online(100), KeepAll(), random_policy(1), random_policy(2)):
        assert_same_step(make_step, lambda: scrimp.session(policy), backward_inside=backward_inside)  # noqa: B023
