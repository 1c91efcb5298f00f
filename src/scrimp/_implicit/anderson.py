"""Anderson acceleration for many independent samples at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .tolerance import euclidean


class AndersonHistory:
    """The last steps of an iteration, and the combination of them that makes the residual least.

    Differences of successive residuals and of successive images lie in two ring buffers that are allocated once. The
    Gram matrix of the former, scaled to length one, is updated by one row a step. So remembering a step reads one
    buffer once, and combining the steps reads each once.
    """

    def __init__(self, like: Tensor, depth: int) -> None:
        samples, columns = like.shape
        self._depth = depth
        self._pushed = 0
        # Slots that were not filled yet are never read.
        self._residuals = like.new_empty(samples, depth, columns)
        self._images = like.new_empty(samples, depth, columns)
        self._gram = like.new_zeros(samples, depth, depth, dtype=torch.float64)
        # What scales a difference to length one; 0 where it takes no part, being zero or not finite.
        self._inverses = like.new_zeros(samples, 1, depth, dtype=torch.float64)
        self._last: tuple[Tensor, Tensor] | None = None
        # Rounding puts noise of about eps into products of columns of length one.
        self._diagonal = 1 + 4 * torch.finfo(like.dtype).eps

    def grow(self, depth: int) -> None:
        """Remember more from now on."""
        if depth <= self._depth:
            return
        used, missing = min(self._pushed, self._depth), depth - self._depth
        self._residuals = _wider(self._residuals, depth, used)
        self._images = _wider(self._images, depth, used)
        self._gram = torch.nn.functional.pad(self._gram, (0, missing, 0, missing))
        self._inverses = torch.nn.functional.pad(self._inverses, (0, missing))
        self._depth, self._pushed = depth, used

    def note(self, x: Tensor, r: Tensor) -> None:
        """Remember that state ``x`` has residual ``r``."""
        if self._last is not None:
            slot = self._pushed % self._depth
            self._pushed += 1
            difference = torch.sub(r, self._last[1], out=self._residuals[:, slot])
            torch.sub(x, self._last[0], out=self._images[:, slot]).add_(difference)
            self._meet(slot)
        self._last = (x, r)

    def combine(self, x: Tensor, r: Tensor, damping: float | Tensor) -> Tensor:
        """The next state after ``x`` with residual ``r``, which must be what was noted last."""
        used = min(self._pushed, self._depth)
        if not used:
            return x + damping * r
        weights = self._weights(r, used).to(r.dtype)
        combined = torch.baddbmm(x.unsqueeze(1), weights, self._images[:, :used], alpha=-1).squeeze(1).add_(r)
        if isinstance(damping, float) and damping == 1.0:
            return combined
        return combined - (1 - damping) * self._left(r, weights)

    def promise(self, r: Tensor) -> Tensor:
        """The share of the residual noted last that the best combination would leave, by the linear model."""
        weights = self._weights(r, min(self._pushed, self._depth)).to(r.dtype)
        return euclidean(self._left(r, weights)) / euclidean(r)

    def forget(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Drop the past of the samples of a mask, which go on from ``x``."""
        for buffer in (self._residuals, self._images, self._gram, self._inverses):
            buffer.masked_fill_(samples.view(-1, 1, 1), 0)
        self._gram.diagonal(dim1=1, dim2=2).masked_fill_(samples.unsqueeze(1), self._diagonal)
        if self._last is not None:
            rows = samples.unsqueeze(1)
            self._last = (torch.where(rows, x, self._last[0]), torch.where(rows, r, self._last[1]))

    def _left(self, r: Tensor, weights: Tensor) -> Tensor:
        """What a combination leaves of the residual."""
        differences = self._residuals[:, : weights.shape[2]]
        return torch.baddbmm(r.unsqueeze(1), weights, differences, alpha=-1).squeeze(1)

    def _meet(self, slot: int) -> None:
        """Update the Gram matrix by the newest difference."""
        used = min(self._pushed, self._depth)
        differences, inverses = self._residuals[:, :used], self._inverses[:, 0, :used]
        row = torch.bmm(differences[:, slot : slot + 1], differences.mT).squeeze(1).double()
        length = row[:, slot].sqrt()
        inverses[:, slot] = length.reciprocal_().nan_to_num_(0.0, 0.0, 0.0)
        row.mul_(inverses).mul_(inverses[:, slot : slot + 1]).nan_to_num_(0.0, 0.0, 0.0)
        self._gram[:, slot, :used] = row
        self._gram[:, :used, slot] = row
        self._gram[:, slot, slot] = self._diagonal

    def _weights(self, r: Tensor, used: int) -> Tensor:
        """Least-squares weights of the differences, per sample, on columns scaled to length one."""
        inverses = self._inverses[:, :, :used]
        against = products(r, self._residuals[:, :used]).double().mul_(inverses).nan_to_num_(0.0, 0.0, 0.0)
        solution, _ = torch.linalg.solve_ex(self._gram[:, :used, :used], against.mT)
        weights: Tensor = solution.mT * inverses
        return weights


def _wider(buffer: Tensor, depth: int, used: int) -> Tensor:
    samples, _, columns = buffer.shape
    wider = buffer.new_empty(samples, depth, columns)
    wider[:, :used] = buffer[:, :used]
    return wider


def products(vector: Tensor, rows: Tensor) -> Tensor:
    """Scalar products of each sample's vector with its rows, of shape (samples, 1, rows).

    Written as vector · rowsᵀ: rows · vector is the same, but ten times slower in torch's batched kernels on
    a CPU.
    """
    return torch.bmm(vector.unsqueeze(1), rows.mT)
