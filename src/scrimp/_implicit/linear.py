"""Linear solvers for many independent systems A·x = rhs, one a row, that know only products with A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .anderson import AndersonHistory
from .checks import need_count, need_positive
from .gmres import LinearSolution, at_least, gmres, relative_norm
from .krylov import Apply
from .tolerance import euclidean


class LinearSolver(Protocol):
    """How the adjoint equation is solved."""

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Solve to a relative residual of ``rtol`` if possible; the answer says how far it got."""


@dataclass(frozen=True, slots=True)
class GMRES:
    """Generalised minimal residuals, restarted: the fewest products, and up to ``restart`` states held.

    Attributes:
        restart: How many basis vectors are held before the method begins again from where it is.
        max_products: How many products with the Jacobian it may take.
    """

    restart: int = 60
    max_products: int = 300

    def __post_init__(self) -> None:
        need_count("restart", self.restart, 1)
        need_count("max_products", self.max_products, 1)

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Solve to a relative residual of ``rtol`` if possible."""
        return gmres(apply, rhs, start, rtol, self.restart, self.max_products)


@dataclass(frozen=True, slots=True)
class BiCGSTAB:
    """Stabilised bi-conjugate gradients: eight states held however long it takes, two products a step.

    Attributes:
        max_products: How many products with the Jacobian it may take.
    """

    max_products: int = 600

    def __post_init__(self) -> None:
        need_count("max_products", self.max_products, 1)

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Solve to a relative residual of ``rtol`` if possible, beginning again where it breaks down."""
        length = euclidean(rhs)
        x = torch.zeros_like(rhs) if start is None else start
        residual = rhs if start is None else rhs - apply(start)
        products = 0 if start is None else 1
        while True:
            relative = relative_norm(residual, length)
            wanted = relative > rtol
            if not bool(wanted.any()) or products + 3 > self.max_products:
                break
            correction, taken = _bicgstab_run(apply, residual, rtol * length, self.max_products - products - 1)
            x_next = x + correction
            residual_next = rhs - apply(x_next)
            products += taken + 1
            # A run that halves the residual earns another; its recurrence drifts away from the truth.
            worth = relative_norm(residual_next, length) < relative
            keep = worth.unsqueeze(1)
            x, residual = torch.where(keep, x_next, x), torch.where(keep, residual_next, residual)
            if not bool((wanted & (relative_norm(residual, length) < relative / 2)).any()):
                relative = relative_norm(residual, length)
                break
        amplification = at_least(torch.zeros_like(length, dtype=torch.float64), x, length)
        return LinearSolution(x, relative, products, amplification)


@dataclass(frozen=True, slots=True)
class Neumann:
    """The first ``terms`` terms of the series Σ (1 − A)ⁱ: cheap and flat, but only near a strong contraction.

    The residual is measured with one product more, so a series that is too short, or diverges, is noticed.

    Attributes:
        terms: How many terms, the right-hand side itself being the first.
        damping: Takes damped terms, as unrolling damped steps would.
    """

    terms: int
    damping: float = 1.0

    def __post_init__(self) -> None:
        need_count("terms", self.terms, 1)
        need_positive("damping", self.damping)

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Sum the series; neither ``start`` nor ``rtol`` changes it."""
        length = euclidean(rhs)
        x = self.damping * rhs
        for _ in range(self.terms - 1):
            x = x + self.damping * (rhs - apply(x))
        residual = rhs - apply(x)
        relative = relative_norm(residual, length)
        # After k terms the residual is the k-th power of what one more term would shrink it by.
        rate = relative.double() ** (1 / self.terms)
        series = torch.where(rate < 1, 1 / (1 - rate), torch.inf)
        return LinearSolution(x, relative, self.terms, at_least(series, x, length))


@dataclass(frozen=True, slots=True)
class Dense:
    """The whole matrix, and LU in double precision: for few unknowns a sample; holds their square.

    Exact however close to singular; takes as many products as a sample has unknowns.
    """

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Build the matrix column by column and factorise it; ``start`` is not needed."""
        unit = torch.zeros_like(rhs)
        columns = []
        for index in range(rhs.shape[1]):
            unit[:, index] = 1
            columns.append(apply(unit).double())
            unit[:, index] = 0
        matrix = torch.stack(columns, dim=2) if columns else rhs.new_zeros(*rhs.shape, 0, dtype=torch.float64)
        finite = matrix.isfinite().flatten(1).all(1)
        matrix = torch.where(finite.view(-1, 1, 1), matrix, torch.eye(rhs.shape[1], device=rhs.device))
        solution, info = torch.linalg.solve_ex(matrix, rhs.double().unsqueeze(2))
        usable = finite & (info == 0)
        x = torch.where(usable.unsqueeze(1), solution.squeeze(2), 0).to(rhs.dtype)
        length = euclidean(rhs)
        relative = relative_norm(rhs - apply(x), length)
        smallest = torch.linalg.svdvals(matrix).amin(1) if columns else torch.ones_like(length).double()
        amplification = torch.where(usable, 1 / smallest, torch.inf)
        return LinearSolution(x, relative, rhs.shape[1] + 1, amplification)


def _bicgstab_run(apply: Apply, rhs: Tensor, goal: Tensor, max_products: int) -> tuple[Tensor, int]:
    """One run from zero until every sample's recurrence says that it is done, or broke down."""
    x, r, shadow, p = torch.zeros_like(rhs), rhs, rhs, rhs
    rho = _dot(shadow, r)
    active = (euclidean(rhs) > goal).unsqueeze(1)
    products = 0
    while products + 2 <= max_products and bool(active.any()):
        v = apply(p)
        alpha = _ratio(rho, _dot(shadow, v), active)
        s = r - alpha * v
        t = apply(s)
        products += 2
        omega = _ratio(_dot(t, s), _dot(t, t), active)
        x = x + alpha * p + omega * s
        r = torch.where(active, s - omega * t, r)
        rho_next = _dot(shadow, r)
        beta = _ratio(rho_next, rho, active) * _ratio(alpha, omega, active)
        p = r + beta * (p - omega * v)
        sound = (alpha != 0) & (omega != 0) & (beta != 0) & r.isfinite().all(1, keepdim=True)
        active = active & sound & (euclidean(r) > goal).unsqueeze(1)
        rho = rho_next
    return x, products


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def _ratio(above: Tensor, below: Tensor, active: Tensor) -> Tensor:
    """Above / below where that makes sense, else 0."""
    ratio = above / below
    return torch.where(active & ratio.isfinite(), ratio, 0)


def anderson_solve(
    apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float, depth: int, damping: float, max_products: int
) -> LinearSolution:
    """Anderson acceleration of x ← x + (rhs − A·x)."""
    length = euclidean(rhs)
    history = AndersonHistory(rhs, depth)
    x = torch.zeros_like(rhs) if start is None else start
    residual = rhs if start is None else rhs - apply(start)
    best, best_relative = x, relative_norm(residual, length)
    products = 0 if start is None else 1
    while products < max_products and bool((best_relative > rtol).any()):
        history.note(x, residual)
        x = history.combine(x, residual, damping)
        residual = rhs - apply(x)
        products += 1
        relative = relative_norm(residual, length)
        better = relative < best_relative
        best = torch.where(better.unsqueeze(1), x, best)
        best_relative = torch.where(better, relative, best_relative)
    amplification = at_least(torch.zeros_like(length, dtype=torch.float64), best, length)
    return LinearSolution(best, best_relative, products, amplification)
