"""Restarted GMRES for many independent non-symmetric systems at once, knowing only matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .anderson import products
from .tolerance import euclidean

Apply = Callable[[Tensor], Tensor]

# A basis grows by blocks of this many vectors: no copies of old ones, few small products.
BLOCK = 8
# A vector that loses this share of its length to the basis has lost digits too, and is orthogonalised again.
LOSS = 0.5
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
    x = torch.zeros_like(rhs) if start is None else start
    products = 0 if start is None else 1
    residual = rhs if start is None else rhs - apply(start)
    amplification = torch.zeros_like(length, dtype=torch.float64)
    hessenberg: Tensor | None = None
    while True:
        relative = relative_norm(residual, length)
        wanted = relative > rtol
        room = max_products - products - 1
        if not bool(wanted.any()) or room < 1:
            break
        cycle = _Cycle(residual, min(restart, room, max(rhs.shape[1], 1)))
        cycle.run(apply, rtol * length)
        x_next = x + cycle.correction()
        products += cycle.size + 1
        residual_next = rhs - apply(x_next)
        better = relative_norm(residual_next, length) < relative
        keep = better.unsqueeze(1)
        x, residual = torch.where(keep, x_next, x), torch.where(keep, residual_next, residual)
        amplification = torch.maximum(amplification, cycle.amplification())
        hessenberg = cycle.hessenberg() if hessenberg is None else hessenberg
        if not bool((better & wanted).any()):
            break
    return LinearSolution(x, relative, products, at_least(amplification, x, length), hessenberg)


def at_least(amplification: Tensor, x: Tensor, rhs_norm: Tensor) -> Tensor:
    """An estimate of ‖A⁻¹‖ that is no smaller than what the solution itself shows."""
    return torch.maximum(amplification, torch.where(rhs_norm > 0, euclidean(x) / rhs_norm, 0.0).double())


def grown(matrices: Tensor, rows: int, columns: int) -> Tensor:
    """The matrices with rows and columns of zeros added at the ends."""
    padding = (0, columns, 0, rows) if rows else (0, columns)
    return torch.nn.functional.pad(matrices, padding)


class Krylov:
    """An orthonormal basis of the Krylov space of every sample, and the matrix of A in it."""

    def __init__(self, first: Tensor, size: int) -> None:
        self.blocks: list[Tensor] = []
        self.size = 0
        self._length = euclidean(first).double()
        self.matrix = first.new_zeros(first.shape[0], 1, 0, dtype=torch.float64)
        self._capacity = size + 1
        self._append(first, self._length)

    @property
    def first_length(self) -> Tensor:
        """The length of the vector that the space began with."""
        return self._length

    def last(self) -> Tensor:
        """The newest basis vector."""
        return self.blocks[-1][:, self.size % BLOCK]

    def extend(self, image: Tensor) -> Tensor:
        """Take in A times the newest vector; gives the matrix's column, ending in 0 where the space ends."""
        before = euclidean(image).double()
        rest, weights = self._orthogonal(image)
        after = euclidean(rest).double()
        if bool((after < LOSS * before).any()):
            rest, more = self._orthogonal(rest)
            weights, after = weights + more, euclidean(rest).double()
        eps = torch.finfo(image.dtype).eps
        after = torch.where(after > 10 * eps * before, after, 0.0)
        column = torch.cat([weights, after.unsqueeze(1)], dim=1)
        if self.size == self.matrix.shape[2]:
            self.matrix = grown(self.matrix, BLOCK, BLOCK)
        self.matrix[:, : self.size + 2, self.size] = column
        self.size += 1
        self._append(rest, after)
        return column

    def combine(self, weights: Tensor) -> Tensor:
        """The combination of basis vectors with these weights, a row of them for each sample."""
        weights = weights.to(self.blocks[0].dtype).unsqueeze(1)
        parts = torch.split(weights, BLOCK, dim=2)
        total = torch.bmm(parts[0], self.blocks[0][:, : parts[0].shape[2]])
        for part, block in zip(parts[1:], self.blocks[1:], strict=False):
            total = torch.baddbmm(total, part, block[:, : part.shape[2]])
        return total.squeeze(1)

    def _append(self, vector: Tensor, length: Tensor) -> None:
        if self.size % BLOCK == 0:
            rows, columns = vector.shape
            self.blocks.append(vector.new_empty(rows, min(BLOCK, self._capacity - self.size), columns))
        inverse = torch.where((length > 0) & length.isfinite(), 1 / length, 0.0)
        torch.mul(vector, inverse.to(vector.dtype).unsqueeze(1), out=self.last())

    def _orthogonal(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        filled = self.size + 1
        views = [b[:, : min(b.shape[1], filled - BLOCK * i)] for i, b in enumerate(self.blocks)]
        weights = [products(vector, view) for view in views]
        rest = vector.unsqueeze(1)
        for view, weight in zip(views, weights, strict=True):
            rest = torch.baddbmm(rest, weight, view, alpha=-1)
        return rest.squeeze(1), torch.cat(weights, dim=2).squeeze(1).double()


class _Cycle:
    """One run of GMRES between restarts: Arnoldi's process, and a QR factorisation that grows with it."""

    def __init__(self, residual: Tensor, size: int) -> None:
        samples = residual.shape[0]
        self._krylov = Krylov(residual, size)
        wide = self._krylov.first_length
        self._rotation = wide.new_ones(samples, 1, 1)
        self._upper = wide.new_zeros(samples, 0, 0)
        self._right = wide.new_zeros(samples, 0)
        self._capacity = size

    @property
    def size(self) -> int:
        """How many products were taken."""
        return self._krylov.size

    def run(self, apply: Apply, goal: Tensor) -> None:
        """Extend the space until the residual of every sample is below its goal or the space is full."""
        length = self._krylov.first_length
        left, open_ended = length, length > 0
        while self.size < self._capacity and bool((open_ended & (left > goal)).any()):
            self._take(self._krylov.extend(apply(self._krylov.last())), open_ended)
            left = length * self._rotation[:, self.size, 0].abs()
            open_ended = open_ended & (self._krylov.matrix[:, self.size, self.size - 1] > 0)

    def correction(self) -> Tensor:
        """The combination of the basis with the least residual."""
        k = self.size
        weights = torch.linalg.solve_triangular(self._upper[:, :k, :k], self._right[:, :k].unsqueeze(2), upper=True)
        return self._krylov.combine(weights.squeeze(2).nan_to_num(0.0, 0.0, 0.0))

    def amplification(self) -> Tensor:
        """An estimate of ‖A⁻¹‖ on the space, by inverse iteration with the triangular factor."""
        k = self.size
        upper = self._upper[:, :k, :k]
        vector = self._right[:, :k].unsqueeze(2)
        growth = torch.ones_like(self._krylov.first_length)
        for _ in range(4):
            vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp_min(1e-300)
            vector = torch.linalg.solve_triangular(upper, vector, upper=True)
            growth = torch.linalg.vector_norm(vector, dim=1).squeeze(1)
            vector = vector / growth.view(-1, 1, 1).clamp_min(1e-300)
            vector = torch.linalg.solve_triangular(upper.mT, vector, upper=False)
        return growth

    def hessenberg(self) -> Tensor:
        """The first rows and columns of Arnoldi's matrix."""
        k = min(self.size, KEPT)
        return self._krylov.matrix[:, :k, :k].clone()

    def _grow(self) -> None:
        """Make room for a block of columns more."""
        self._upper, self._right = grown(self._upper, BLOCK, BLOCK), grown(self._right, 0, BLOCK)
        size = self._rotation.shape[1]
        self._rotation = grown(self._rotation, BLOCK, BLOCK)
        self._rotation.diagonal(dim1=1, dim2=2)[:, size:] = 1

    def _take(self, column: Tensor, open_ended: Tensor) -> None:
        """Rotate a column to triangular form; where the space has ended it changes nothing."""
        k = self.size - 1
        if k == self._right.shape[1]:
            self._grow()
        rotated = torch.bmm(self._rotation[:, : k + 2, : k + 2], column.unsqueeze(2)).squeeze(2)
        above, below = rotated[:, k], rotated[:, k + 1]
        radius = torch.hypot(above, below)
        turn = open_ended & (radius > 0) & radius.isfinite()
        cos, sin = torch.where(turn, above / radius, 1.0), torch.where(turn, below / radius, 0.0)
        self._upper[:, :k, k] = torch.where(turn.unsqueeze(1), rotated[:, :k], 0.0)
        self._upper[:, k, k] = torch.where(turn, radius, 1.0)
        old, new = self._rotation[:, k].clone(), self._rotation[:, k + 1].clone()
        self._rotation[:, k] = cos.unsqueeze(1) * old + sin.unsqueeze(1) * new
        self._rotation[:, k + 1] = cos.unsqueeze(1) * new - sin.unsqueeze(1) * old
        self._right[:, k] = torch.where(turn, self._krylov.first_length * self._rotation[:, k, 0], 0.0)
