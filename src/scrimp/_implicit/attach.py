"""A solution as a differentiable function of all that its equation depends on, closures included.

Let A be minus the Jacobian of the residual R at the solution x*. From z₀ = x*, held constant,

    zₖ₊₁ = zₖ + A⁻¹ R(zₖ)

changes nothing in value, because R(x*) is zero. But its derivatives grow right one order a time: this is
Newton's
iteration with a constant matrix, whose error in the parameters gains an order with each step. R is
evaluated under
autograd, so whatever it touches is reached; A⁻¹ is a node that solves a linear system with Aᵀ in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import OrderError
from .equation import Equation, Linearisation

Solve = Callable[[Tensor, bool], Tensor]
"""Solves A·x = rhs, or with Aᵀ if the flag is set."""


def attach(equation: Equation, at: Linearisation, x: Tensor, solve: Solve, order: int) -> Tensor:
    """The solution x with derivatives up to ``order``."""
    with torch.enable_grad():
        z = x.detach() + _inverse(at.residual, solve, order)
        for _ in range(order - 1):
            z = z + _inverse(equation.residual(z), solve, order)
    return z


def _inverse(residual: Tensor, solve: Solve, remaining: int) -> Tensor:
    zero: Tensor = _Inverse.apply(residual, solve, remaining)  # type: ignore[no-untyped-call]
    return zero


def _solved(rhs: Tensor, residual: Tensor, solve: Solve, remaining: int, transposed: bool) -> Tensor:
    inputs = rhs, residual, solve, remaining, transposed
    solution: Tensor = _Solved.apply(*inputs)  # type: ignore[no-untyped-call]
    return solution


class _Inverse(torch.autograd.Function):
    """A⁻¹ times a residual that is zero: zero in forward, a linear system in backward."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solve: Solve, remaining: int) -> Tensor:
        ctx.save_for_backward(residual)
        ctx.solve, ctx.remaining = solve, remaining
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (residual,) = ctx.saved_tensors
        return _solved(gradients[0], residual, ctx.solve, ctx.remaining - 1, True), None, None


class _Solved(torch.autograd.Function):
    """The solution of a linear system as a function of its right-hand side, for derivatives of higher order.

    Takes the residual only so that whoever differentiates with respect to what the residual depends on
    must come
    by here, and hears if the order does not suffice.
    """

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, residual: Tensor, solve: Solve, remaining: int, transposed: bool) -> Tensor:
        ctx.save_for_backward(residual)
        ctx.solve, ctx.remaining, ctx.transposed = solve, remaining, transposed
        return solve(rhs, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.remaining < 1:
            raise OrderError(
                "a derivative of higher order was asked for than the solution has: "
                "pass order=2 for second derivatives, order=3 for third ones"
            )
        (residual,) = ctx.saved_tensors
        solved = _solved(gradients[0], residual, ctx.solve, ctx.remaining - 1, not ctx.transposed)
        return solved, None, None, None, None
