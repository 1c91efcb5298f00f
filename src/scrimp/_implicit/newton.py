"""Newton's method with GMRES steps and a line search, for many independent samples at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .equation import Equation
from .gmres import gmres
from .tolerance import euclidean

# Halvings of a step before it is called useless.
HALVINGS = 10
# Share of the linear model's promise that a step must keep (Armijo's rule).
SUFFICIENT = 1e-4
# A Newton system far from the solution needs no more accuracy than this.
LOOSEST, TIGHTEST = 1e-1, 1e-3


class NewtonStepper:
    """Solves the linearised equation by GMRES on difference quotients: f need not be twice differentiable."""

    def __init__(self, equation: Equation, restart: int = 30, max_products: int = 90) -> None:
        self._equation = equation
        self._restart, self._max_products = restart, max_products
        self._stalled: Tensor | None = None

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """The Newton step, shortened until it helps."""
        direction = self._direction(x, r, norm, bound)
        if self._equation.merit is None:
            return self._search_residual(x, r, direction)
        return self._search_merit(x, r, direction)

    def aim(self, bound: Tensor) -> Tensor:
        """The bound."""
        return bound

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """Nothing: a step takes evaluations."""
        return x

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Nothing to forget: every step begins afresh."""

    def given_up(self) -> Tensor | None:
        """The samples that no step length improved."""
        return self._stalled

    def _direction(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> Tensor:
        # No sample needs its system solved further than to its own tolerance; unsolved ones decide.
        needed = torch.where(norm > bound, 0.3 * bound / norm, LOOSEST).nan_to_num(LOOSEST)
        rtol = float(needed.min().clamp(TIGHTEST, LOOSEST)) if needed.numel() else LOOSEST
        nudge = max(torch.finfo(x.dtype).eps, self._equation.layout.coarsest_eps) ** 0.5
        size = 1 + euclidean(x).unsqueeze(1)

        def apply(w: Tensor) -> Tensor:
            length = euclidean(w).unsqueeze(1)
            factor = torch.where(length > 0, nudge * size / length, 0)
            quotient = (r - self._equation.evaluate(x + factor * w)) / factor
            return torch.where(factor > 0, quotient, 0)

        clean = torch.where(norm.isfinite().unsqueeze(1), r, 0)
        return gmres(apply, clean, None, rtol, self._restart, self._max_products).x

    def _search_residual(self, x: Tensor, r: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        before = euclidean(r)
        length = torch.ones_like(before)
        for _ in range(HALVINGS):
            x_next = x + length.unsqueeze(1) * direction
            r_next = self._equation.evaluate(x_next)
            good = euclidean(r_next) <= (1 - SUFFICIENT * length) * before
            if bool(good.all()):
                break
            length = torch.where(good, length, length / 2)
        self._stalled = ~good
        rows = good.unsqueeze(1)
        return torch.where(rows, x_next, x), torch.where(rows, r_next, r)

    def _search_merit(self, x: Tensor, r: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Go down the merit function. The residual is its negative gradient."""
        merit = self._equation.merit
        assert merit is not None
        downhill = (direction * r).sum(1, keepdim=True) > 0
        direction = torch.where(downhill, direction, r)
        slope = (direction * r).sum(1)
        before, residual_before = merit(x), euclidean(r)
        noise = 8 * torch.finfo(x.dtype).eps * before.abs()
        length = torch.ones_like(slope)
        for _ in range(2 * HALVINGS):
            x_next = x + length.unsqueeze(1) * direction
            r_next = self._equation.evaluate(x_next)
            after = merit(x_next)
            good = after <= before - SUFFICIENT * length * slope
            # Near the minimum the merit's change drowns in rounding; there the gradient decides.
            good |= ((after - before).abs() <= noise) & (euclidean(r_next) < residual_before)
            if bool(good.all()):
                break
            length = torch.where(good, length, length / 2)
        self._stalled = ~good
        rows = good.unsqueeze(1)
        return torch.where(rows, x_next, x), torch.where(rows, r_next, r)
