"""Arnoldi's process for many independent samples at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .anderson import products
from .tolerance import euclidean

Apply = Callable[[Tensor], Tensor]

# A basis grows by blocks of this many vectors: no copies of old ones, few small products.
BLOCK = 8
# A vector that is less than this share, in squares, of what it lost to the basis has lost digits too, and is
# orthogonalised again.
LOSS = 1 / 3
# A vector of so many times the rounding of the image that it was left of is nothing.
NOTHING = 10.0


def grown(matrices: Tensor, rows: int, columns: int) -> Tensor:
    """The matrices with rows and columns of zeros added at the ends."""
    padding = (0, columns, 0, rows) if rows else (0, columns)
    return torch.nn.functional.pad(matrices, padding)


class Krylov:
    """An orthonormal basis of the Krylov space of every sample, and the matrix of A in it.

    Attributes:
        blocks: The basis, in blocks of vectors.
        size: How many products were taken in; the basis has one vector more.
        matrix: A in the basis, per sample, with one row more than columns; more rows and columns follow that are
            not filled yet.
        first_length: The length of the vector that the space began with.
        ended: Whether the space of some sample may have ended: then the newest vector is zero.
    """

    def __init__(self, first: Tensor, size: int) -> None:
        self.blocks: list[Tensor] = []
        self.size = 0
        self.first_length = euclidean(first).double()
        self.matrix = first.new_zeros(first.shape[0], 1, 0, dtype=torch.float64)
        self.ended = False
        self._going_on: Tensor | None = None
        self._capacity = size + 1
        self._append(first, _inverse(self.first_length))

    def last(self) -> Tensor:
        """The newest basis vector."""
        return self.blocks[-1][:, self.size % BLOCK]

    def extend(self, image: Tensor) -> Tensor:
        """Take in A times the newest vector; gives the matrix's column, ending in 0 where the space ends."""
        # The newest vector's share goes first: where A is near a multiple of one it is nearly all of the image, and
        # what is left has its own digits. The share of the vector before is near enough, for the rest of it goes next.
        newest, k = self.last(), self.size
        share = self.matrix[:, k - 1, k - 1 : k] if k else products(image, newest.unsqueeze(1)).squeeze(2).double()
        rest = torch.addcmul(image, share.to(image.dtype), newest, value=-1)
        weights = self._take_out(rest)
        length = euclidean(rest).double()
        lost = weights.square().sum(1).mul_(LOSS)
        eps = NOTHING * torch.finfo(image.dtype).eps
        weak = ~(length.square() > torch.addcmul(lost, share[:, 0], share[:, 0], value=eps**2))
        self.ended = bool(weak.any())
        if self.ended:
            weights = weights + self._take_out(rest)
            length = euclidean(rest).double()
            share = share if self._going_on is None else torch.where(self._going_on, share, 0.0)
        weights[:, -1:] += share
        if self.ended:
            whole = torch.hypot(length, torch.linalg.vector_norm(weights, dim=1))
            length = torch.where(length > eps * whole, length, 0.0)
            self._going_on = (length > 0).unsqueeze(1)
        if k == self.matrix.shape[2]:
            self.matrix = grown(self.matrix, BLOCK, BLOCK)
        column = self.matrix[:, : k + 2, k]
        column[:, :-1], column[:, -1] = weights, length
        self.size += 1
        self._append(rest, _inverse(length))
        return column

    def combine(self, weights: Tensor) -> Tensor:
        """The combination of basis vectors with these weights, a row of them for each sample."""
        weights = weights.to(self.blocks[0].dtype).unsqueeze(1)
        parts = torch.split(weights, BLOCK, dim=2)
        total = torch.bmm(parts[0], self.blocks[0][:, : parts[0].shape[2]])
        for part, block in zip(parts[1:], self.blocks[1:], strict=False):
            total.baddbmm_(part, block[:, : part.shape[2]])
        return total.squeeze(1)

    def _append(self, vector: Tensor, inverse: Tensor) -> None:
        if self.size % BLOCK == 0:
            rows, columns = vector.shape
            self.blocks.append(vector.new_empty(rows, min(BLOCK, self._capacity - self.size), columns))
        torch.mul(vector, inverse.to(vector.dtype).unsqueeze(1), out=self.last())

    def _take_out(self, vector: Tensor) -> Tensor:
        """Subtract from the vector, in place, what lies along the basis; gives the weights."""
        filled = self.size + 1
        views = [b[:, : min(b.shape[1], filled - BLOCK * i)] for i, b in enumerate(self.blocks)]
        row = vector.unsqueeze(1)
        weights = [torch.bmm(row, view.mT) for view in views]
        for view, weight in zip(views, weights, strict=True):
            row.baddbmm_(weight, view, alpha=-1)
        whole = weights[0] if len(weights) == 1 else torch.cat(weights, dim=2)
        return whole.squeeze(1).double()


def _inverse(lengths: Tensor) -> Tensor:
    """1 / length, or 0 where that is no number."""
    return lengths.reciprocal().nan_to_num_(0.0, 0.0, 0.0)
