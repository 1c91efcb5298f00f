"""Restarted GMRES for many independent non-symmetric systems at once, knowing only matrix-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .krylov import Apply, Krylov
from .pace import KEEN, REMEMBERED, SHARE, WIDE, steps_missing
from .tolerance import euclidean

# After so many products it is decided whether the basis is worth its cost.
PROBE = 8
# The normal matrix shows ‖A⁻¹‖ up to about here, beyond it a singular value decomposition must.
DOUBTFUL = 1e6
# A residual that is within its goal by recurrence may miss it in truth, for rounding. By so little it is let pass: what
# another cycle costs is two products, and often it gains nothing.
SLACK = 1.5
# Arnoldi's matrix is kept up to this size for estimates of eigenvalues: extreme ones appear first.
KEPT = 16


@dataclass(frozen=True, slots=True)
class LinearSolution:
    """What a linear solver found. One entry a sample.

    Attributes:
        x: The solutions, a row each.
        residual: Norm of rhs − A·x relative to rhs, computed afresh from x.
        products: How many products with A it took.
        amplification: Estimate of ‖A⁻¹‖: how much error a residual may stand for.
        hessenberg: Arnoldi's matrix of A, its first rows and columns; None where the method makes none.
    """

    x: Tensor
    residual: Tensor
    products: int
    amplification: Tensor
    hessenberg: Tensor | None = None


def relative_norm(residual: Tensor, rhs_norm: Tensor) -> Tensor:
    """Norms of rows relative to ``rhs_norm``; a zero right-hand side has no error."""
    return torch.where(rhs_norm > 0, euclidean(residual) / rhs_norm, euclidean(residual))


def gmres(
    apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float, restart: int, max_products: int
) -> LinearSolution:
    """Solve A·x = rhs to a relative residual of ``rtol``, each sample for itself.

    The residual that decides is computed from x at the end of every cycle, not by recurrence.
    """
    length = euclidean(rhs)
    goal = rtol * length
    x = torch.zeros_like(rhs) if start is None else start
    products = 0 if start is None else 1
    residual = rhs if start is None else rhs - apply(start)
    amplification = torch.zeros_like(length, dtype=torch.float64)
    hessenberg: Tensor | None = None
    allowed = torch.full_like(length, rtol)
    while True:
        relative = relative_norm(residual, length)
        wanted = relative > allowed
        room = max_products - products - 1
        if not bool(wanted.any()) or room < 1:
            break
        cycle = _Cycle(residual, min(restart, room, max(rhs.shape[1], 1)))
        plain = cycle.run(apply, goal, probing=hessenberg is None and rhs.shape[1] >= WIDE)
        x_next = x + cycle.correction()
        products += cycle.size + 1
        promised = cycle.left()
        if plain:
            more, promised, taken = _series(apply, cycle.residual(), goal, plain, max_products - products)
            x_next, products = x_next + more, products + taken
        residual_next = rhs - apply(x_next)
        relative_next = relative_norm(residual_next, length)
        # Where only rounding is in the way another cycle must be earned, by one that halves the residual.
        rounded = promised <= goal
        allowed = torch.where(rounded, SLACK * rtol, rtol)
        worth = relative_next < torch.where(rounded, relative / 2, relative)
        better = relative_next < relative
        keep = better.unsqueeze(1)
        x, residual = torch.where(keep, x_next, x), torch.where(keep, residual_next, residual)
        amplification = torch.maximum(amplification, cycle.amplification())
        hessenberg = cycle.hessenberg() if hessenberg is None else hessenberg
        if not bool((worth & wanted).any()):
            relative = relative_norm(residual, length)
            break
    return LinearSolution(x, relative, products, at_least(amplification, x, length), hessenberg)


def _series(apply: Apply, residual: Tensor, goal: Tensor, expected: int, most: int) -> tuple[Tensor, Tensor, int]:
    """Terms of Σ (1 − A)ⁱ · residual until it is below its goal, or is not on its way there.

    Gives their sum, the norm of the residual that should be left, and how many products it took.
    """
    total, term, taken = residual, residual - apply(residual), 1
    norm = euclidean(term)
    while taken < min(2 * expected, most) and bool((norm > goal).any()):
        total = total + term
        term = term - apply(term)
        taken += 1
        norm = euclidean(term)
    return total, norm, taken


def at_least(amplification: Tensor, x: Tensor, rhs_norm: Tensor) -> Tensor:
    """An estimate of ‖A⁻¹‖ that is no smaller than what the solution itself shows."""
    return torch.maximum(amplification, torch.where(rhs_norm > 0, euclidean(x) / rhs_norm, 0.0).double())


class _Cycle:
    """One run of GMRES between restarts.

    With H the matrix of Arnoldi's process, of one row more than columns, the least residual lies along the left null
    vector of H, which grows by one entry a step, and the solution is then found from H's lower rows, a triangle. This
    needs neither rotations nor a factorisation (E. H. Ayachour, A fast implementation for GMRES method, 2003).
    """

    def __init__(self, residual: Tensor, size: int) -> None:
        self.krylov = Krylov(residual, size)
        length = self.krylov.first_length
        self._null = length.new_ones(length.shape[0], size + 1)
        self._squares = torch.ones_like(length)
        self._open = length > 0
        self._all_open = bool(self._open.all())
        self._capacity = size

    @property
    def size(self) -> int:
        """How many products were taken."""
        return self.krylov.size

    def left(self) -> Tensor:
        """The norm of the least residual."""
        return self.krylov.first_length * self._squares.rsqrt()

    def run(self, apply: Apply, goal: Tensor, *, probing: bool) -> int:
        """Extend the space until the residual of every sample is below its goal or the space is full.

        Where it is ``probing`` it may stop early and give the number of plain terms that will do as well.
        """
        while self.size < self._capacity and self._unsolved(goal):
            self._take(self.krylov.extend(apply(self.krylov.last())))
            if probing and self.size == PROBE and (terms := self._plain_terms(goal)):
                return terms
        return 0

    def residual(self) -> Tensor:
        """The least residual."""
        k = self.size
        scale = self.krylov.first_length / self._squares
        return self.krylov.combine(self._null[:, : k + 1] * scale.unsqueeze(1))

    def _unsolved(self, goal: Tensor) -> bool:
        above = self.left() > goal
        return bool((above if self._all_open else above & self._open).any())

    def _plain_terms(self, goal: Tensor) -> int:
        """How many terms of the series Σ (1 − A)ⁱ solve the rest, where that is likely to be cheaper; else 0.

        The first terms are known in the basis already, so looking costs no product.
        """
        k = self.size
        matrix = self.krylov.matrix[:, : k + 1, :k]
        term = matrix.new_zeros(matrix.shape[0], k + 1)
        term[:, 0] = self.krylov.first_length
        terms = [term]
        for _ in range(k):
            term = term - (matrix @ term[:, :k].unsqueeze(2)).squeeze(2)
            terms.append(term)
        ratios = [torch.where(goal > 0, torch.linalg.vector_norm(term, dim=1) / goal, 0.0) for term in terms]
        missing = steps_missing([float(ratio.amax()) for ratio in ratios])
        if not missing < SHARE * self.krylov.blocks[0].shape[2]:
            return 0
        recent = torch.stack(terms[-REMEMBERED:], dim=2)
        directions, _ = torch.linalg.qr(recent.diff(dim=2))
        along = directions @ (directions.mT @ recent[:, :, -1:])
        left = torch.linalg.vector_norm(recent[:, :, -1:] - along, dim=1).squeeze(1)
        promise = left / torch.linalg.vector_norm(term, dim=1)
        return max(1, math.ceil(missing)) if float(promise[ratios[-1] > 1].mean()) > KEEN else 0

    def correction(self) -> Tensor:
        """The combination of the basis with the least residual."""
        k = self.size
        length = self.krylov.first_length.unsqueeze(1)
        lower = -length * self._null[:, 1 : k + 1] / self._squares.unsqueeze(1)
        triangle = self.krylov.matrix[:, 1 : k + 1, :k]
        weights = torch.linalg.solve_triangular(triangle, lower.unsqueeze(2), upper=True)
        return self.krylov.combine(weights.squeeze(2).nan_to_num(0.0, 0.0, 0.0))

    def amplification(self) -> Tensor:
        """An estimate of ‖A⁻¹‖ on the space, by inverse iteration with the normal matrix of H."""
        k = self.size
        hessenberg = self.krylov.matrix[:, : k + 1, :k]
        sound = hessenberg.isfinite().flatten(1).all(1)
        if not bool(sound.all()):
            hessenberg = torch.where(sound.view(-1, 1, 1), hessenberg, 0.0)
        factor, failed = torch.linalg.cholesky_ex(hessenberg.mT @ hessenberg)
        vector = torch.ones_like(hessenberg[:, :1].mT)
        growth = torch.ones_like(self._squares)
        for _ in range(4):
            vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True)
            vector = torch.cholesky_solve(vector, factor)
            growth = torch.linalg.vector_norm(vector, dim=1).squeeze(1)
        growth = growth.sqrt()
        doubtful = (failed > 0) | ~(growth < DOUBTFUL)
        if bool(doubtful.any()):
            smallest = torch.linalg.svdvals(hessenberg[doubtful]).amin(1)
            growth[doubtful] = 1 / smallest
        return growth

    def hessenberg(self) -> Tensor:
        """The first rows and columns of Arnoldi's matrix."""
        k = min(self.size, KEPT)
        return self.krylov.matrix[:, :k, :k].clone()

    def _take(self, column: Tensor) -> None:
        """Extend the null vector; where the space has ended, the column is made to change nothing."""
        k = self.size - 1
        length = column[:, k + 1]
        along = (self._null[:, : k + 1] * column[:, : k + 1]).sum(1)
        if self._all_open and not self.krylov.ended:
            entry = torch.div(along, length, out=self._null[:, k + 1]).neg_()
        else:
            # A space that ends holds the solution: the residual falls to rounding.
            floor = torch.finfo(self.krylov.blocks[0].dtype).eps * torch.linalg.vector_norm(column, dim=1)
            ends = self._open & (length == 0)
            sound = torch.where(ends, floor, length)
            entry = torch.where(self._open, -along / sound, 0.0)
            self.krylov.matrix[:, k + 1, k] = torch.where(self._open, sound, 1.0)
            self._null[:, k + 1] = entry
            self._open = self._open & ~ends & (sound > 0)
            self._all_open = bool(self._open.all())
        self._squares.addcmul_(entry, entry)
