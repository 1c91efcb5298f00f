"""When a residual is small enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .equation import RowNorm

# A tolerance relative to the state says nothing about a state that goes to zero; there the size of the start
# stands in for it. Six more digits leave room for a start that is a million times too large.
START_SHARE = 1e-6


def euclidean(rows: Tensor) -> Tensor:
    """The length of every row, also where squares would overflow or vanish."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    if not rows.numel():
        return lengths
    limits = torch.finfo(rows.dtype)
    small, large = (limits.tiny / limits.eps) ** 0.5, limits.max**0.5
    least, most = torch.aminmax(lengths)
    if not (float(least) >= small and float(most) <= large):
        sizes = power_of_two(rows)
        lengths = torch.linalg.vector_norm(rows / sizes, dim=1) * sizes.squeeze(1)
    return lengths


def power_of_two(rows: Tensor) -> Tensor:
    """A power of two near the largest number of every row, by which to scale without rounding; else 1."""
    largest = rows.abs().amax(1, keepdim=True)
    _, exponents = torch.frexp(largest)
    usable = (largest > 0) & largest.isfinite()
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponents - 1), 1)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Solved means norm(residual) ≤ atol + rtol · scale; ``atol`` None is a share of the start's scale."""

    rtol: float
    atol: float | None
    norm: RowNorm

    def bound(self, scale: Tensor, start_scale: Tensor) -> Tensor:
        """What each sample's residual norm may be."""
        atol = self.rtol * START_SHARE * start_scale if self.atol is None else self.atol
        return atol + self.rtol * scale


def default_rtol(eps: float) -> float:
    """A tolerance within reach where numbers are ``eps`` apart: 1e-10 in double, 1e-6 in single."""
    if eps < 1e-12:
        return 1e-10
    return 1e-6 if eps < 1e-5 else floor_rtol(eps)


def floor_rtol(eps: float) -> float:
    """The smallest tolerance that rounding does not make meaningless."""
    return 4 * eps
