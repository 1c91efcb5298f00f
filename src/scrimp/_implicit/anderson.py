"""Anderson acceleration for many independent samples at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .tolerance import euclidean


class AndersonHistory:
    """The last steps of an iteration, and the combination of them that makes the residual least.

    Differences of successive residuals and of successive images lie in two ring buffers that are
    allocated once.
    Their Gram matrix is updated by one row a step, so a step reads each buffer once.
    """

    def __init__(self, like: Tensor, depth: int) -> None:
        samples, columns = like.shape
        self._depth = depth
        self._pushed = 0
        # Slots that were not filled yet are never read.
        self._residuals = like.new_empty(samples, depth, columns)
        self._images = like.new_empty(samples, depth, columns)
        # The newest difference and the residual itself, which meet the buffer in one pass.
        self._pair = like.new_empty(samples, 2, columns)
        self._gram = like.new_zeros(samples, depth, depth, dtype=torch.float64)
        self._against = like.new_zeros(samples, 1, depth, dtype=torch.float64)
        self._last: tuple[Tensor, Tensor] | None = None
        # Relative to the columns scaled to length one: rounding puts noise of about eps into their products.
        self._ridge = 4 * torch.finfo(like.dtype).eps

    def grow(self, depth: int) -> None:
        """Remember more from now on."""
        if depth <= self._depth:
            return
        used = min(self._pushed, self._depth)
        old = self._residuals, self._images, self._gram
        samples, _, columns = self._residuals.shape
        self._residuals = old[0].new_empty(samples, depth, columns)
        self._images = old[1].new_empty(samples, depth, columns)
        self._gram = old[2].new_zeros(samples, depth, depth)
        self._residuals[:, :used], self._images[:, :used] = old[0][:, :used], old[1][:, :used]
        self._gram[:, :used, :used] = old[2][:, :used, :used]
        self._against = torch.nn.functional.pad(self._against, (0, depth - self._depth))
        self._depth, self._pushed = depth, used

    def note(self, x: Tensor, r: Tensor) -> None:
        """Remember that state ``x`` has residual ``r``."""
        if self._last is not None:
            slot = self._pushed % self._depth
            self._pushed += 1
            residual = torch.sub(r, self._last[1], out=self._pair[:, 0])
            self._pair[:, 1], self._residuals[:, slot] = r, residual
            torch.sub(x, self._last[0], out=self._images[:, slot]).add_(residual)
            self._meet(slot)
        self._last = (x, r)

    def combine(self, x: Tensor, r: Tensor, damping: float | Tensor) -> Tensor:
        """The next state after ``x`` with residual ``r``, which must be what was noted last."""
        used = min(self._pushed, self._depth)
        if not used:
            return x + damping * r
        weights = self._weights(used).to(r.dtype)
        # In place, for the memory of a new tensor costs as much as the arithmetic.
        combined = torch.bmm(weights, self._images[:, :used]).squeeze(1).neg_().add_(x).add_(r)
        if isinstance(damping, float) and damping == 1.0:
            return combined
        return combined - (1 - damping) * (r - torch.bmm(weights, self._residuals[:, :used]).squeeze(1))

    def promise(self, r: Tensor) -> Tensor:
        """The share of the residual noted last that the best combination would leave, by the linear model."""
        used = min(self._pushed, self._depth)
        along = torch.bmm(self._weights(used).to(r.dtype), self._residuals[:, :used]).squeeze(1)
        return euclidean(r - along) / euclidean(r)

    def forget(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Drop the past of the samples of a mask, which go on from ``x``."""
        for buffer in (self._residuals, self._images, self._gram, self._against):
            buffer.masked_fill_(samples.view(-1, 1, 1), 0)
        if self._last is not None:
            rows = samples.unsqueeze(1)
            self._last = (torch.where(rows, x, self._last[0]), torch.where(rows, r, self._last[1]))

    def _meet(self, slot: int) -> None:
        """Update the Gram matrix by the newest difference, and the products with the residual."""
        used = min(self._pushed, self._depth)
        both = torch.bmm(self._pair, self._residuals[:, :used].mT)
        self._gram[:, slot, :used] = both[:, 0]
        self._gram[:, :used, slot] = both[:, 0]
        self._against[:, :, :used] = both[:, 1:]

    def _weights(self, used: int) -> Tensor:
        """Least-squares weights of the differences, per sample, on columns scaled to length one."""
        gram = self._gram[:, :used, :used]
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(1)
        # A column of zeros (a frozen or reset sample) or of overflow takes no part.
        usable = (lengths > 0) & lengths.isfinite()
        inverse = torch.where(usable, 1 / lengths, 0)
        scaled = torch.where(usable & usable.mT, gram * inverse * inverse.mT, 0)
        scaled.diagonal(dim1=1, dim2=2).fill_(1 + self._ridge)
        against = torch.where(usable, self._against[:, :, :used] * inverse, 0)
        solution, _ = torch.linalg.solve_ex(scaled, against.mT)
        weights: Tensor = solution.mT * inverse
        return weights


def products(vector: Tensor, rows: Tensor) -> Tensor:
    """Scalar products of each sample's vector with its rows, of shape (samples, 1, rows).

    Written as vector · rowsᵀ: rows · vector is the same, but ten times slower in torch's batched kernels on
    a CPU.
    """
    return torch.bmm(vector.unsqueeze(1), rows.mT)
