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
# A vector that loses this share of its length to the basis has lost digits too, and is orthogonalised again.
LOSS = 0.5


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
        # The newest vector's share goes first: where A is near a multiple of one it is nearly all of the image, and
        # what is left has its own digits.
        newest = self.last()
        share = products(image, newest.unsqueeze(1)).squeeze(2)
        rest = torch.addcmul(image, share, newest, value=-1)
        before = euclidean(rest).double()
        whole = torch.hypot(before, share.squeeze(1).double())
        weights = self._take_out(rest)
        after = euclidean(rest).double()
        if bool((after < LOSS * before).any()):
            weights = weights + self._take_out(rest)
            after = euclidean(rest).double()
        weights[:, -1:] += share
        after = torch.where(after > 10 * torch.finfo(image.dtype).eps * whole, after, 0.0)
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
            total.baddbmm_(part, block[:, : part.shape[2]])
        return total.squeeze(1)

    def _append(self, vector: Tensor, length: Tensor) -> None:
        if self.size % BLOCK == 0:
            rows, columns = vector.shape
            self.blocks.append(vector.new_empty(rows, min(BLOCK, self._capacity - self.size), columns))
        inverse = torch.where((length > 0) & length.isfinite(), 1 / length, 0.0)
        torch.mul(vector, inverse.to(vector.dtype).unsqueeze(1), out=self.last())

    def _take_out(self, vector: Tensor) -> Tensor:
        """Subtract from the vector, in place, what lies along the basis; gives the weights."""
        filled = self.size + 1
        views = [b[:, : min(b.shape[1], filled - BLOCK * i)] for i, b in enumerate(self.blocks)]
        weights = [products(vector, view) for view in views]
        row = vector.unsqueeze(1)
        for view, weight in zip(views, weights, strict=True):
            row.baddbmm_(weight, view, alpha=-1)
        return torch.cat(weights, dim=2).squeeze(1).double()
