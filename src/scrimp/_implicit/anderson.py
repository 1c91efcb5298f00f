"""Anderson acceleration for many independent samples at once."""

from __future__ import annotations

import torch
from torch import Tensor


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
        self._residuals = like.new_zeros(samples, depth, columns)
        self._images = like.new_zeros(samples, depth, columns)
        self._gram = like.new_zeros(samples, depth, depth, dtype=torch.float64)
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
        self._residuals = old[0].new_zeros(samples, depth, columns)
        self._images = old[1].new_zeros(samples, depth, columns)
        self._gram = old[2].new_zeros(samples, depth, depth)
        self._residuals[:, :used], self._images[:, :used] = old[0][:, :used], old[1][:, :used]
        self._gram[:, :used, :used] = old[2][:, :used, :used]
        self._depth, self._pushed = depth, used

    def note(self, x: Tensor, r: Tensor) -> None:
        """Remember that state ``x`` has residual ``r``."""
        image = x + r
        if self._last is not None:
            self._push(r - self._last[0], image - self._last[1])
        self._last = (r, image)

    def combine(self, x: Tensor, r: Tensor, damping: float | Tensor) -> Tensor:
        """The next state after the one noted last."""
        used = min(self._pushed, self._depth)
        if not used:
            return x + damping * r
        residuals, images = self._residuals[:, :used], self._images[:, :used]
        weights = self._weights(r, used).mT
        corrected = x + r - torch.bmm(weights, images).squeeze(1)
        if isinstance(damping, float) and damping == 1.0:
            return corrected
        return corrected - (1 - damping) * (r - torch.bmm(weights, residuals).squeeze(1))

    def forget(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Drop the past of the samples of a mask, which go on from ``x``."""
        for buffer in (self._residuals, self._images, self._gram):
            buffer.masked_fill_(samples.view(-1, 1, 1), 0)
        if self._last is not None:
            rows = samples.unsqueeze(1)
            self._last = (torch.where(rows, r, self._last[0]), torch.where(rows, x + r, self._last[1]))

    def _push(self, residual: Tensor, image: Tensor) -> None:
        slot = self._pushed % self._depth
        self._pushed += 1
        used = min(self._pushed, self._depth)
        self._residuals[:, slot] = residual
        self._images[:, slot] = image
        row = products(residual, self._residuals[:, :used]).squeeze(1).double()
        self._gram[:, slot, :used] = row
        self._gram[:, :used, slot] = row

    def _weights(self, r: Tensor, used: int) -> Tensor:
        """Least-squares weights of the differences, per sample, on columns scaled to length one."""
        gram = self._gram[:, :used, :used]
        against = products(r, self._residuals[:, :used]).mT.double()
        lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        # A column of zeros (a frozen or reset sample) or of overflow takes no part.
        inverse = torch.where((lengths > 0) & lengths.isfinite(), 1 / lengths, 0).unsqueeze(2)
        scaled = (gram * inverse * inverse.mT).nan_to_num(0.0, 0.0, 0.0)
        scaled.diagonal(dim1=1, dim2=2).fill_(1 + self._ridge)
        solution, _ = torch.linalg.solve_ex(scaled, (against * inverse).nan_to_num(0.0, 0.0, 0.0))
        weights: Tensor = (solution * inverse).to(r.dtype)
        return weights


def products(vector: Tensor, rows: Tensor) -> Tensor:
    """Scalar products of each sample's vector with its rows, of shape (samples, 1, rows).

    Written as vector · rowsᵀ: rows · vector is the same, but ten times slower in torch's batched kernels on
    a CPU.
    """
    return torch.bmm(vector.unsqueeze(1), rows.mT)
