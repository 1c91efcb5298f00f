"""Eigenvalues of Jacobians, seen through products with random vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .equation import Linearisation, no_autocast
from .gmres import Krylov

# Extreme eigenvalues show within few steps.
STEPS = 10
# Curvature this far below zero, relative to the largest, is not rounding.
NEGATIVE = 1e-4


def arnoldi(
    apply: Callable[[Tensor], Tensor], like: Tensor, steps: int, generator: torch.Generator
) -> Tensor:
    """Each sample's matrix of ``apply`` in the Krylov space of a random vector, of shape (samples, k, k)."""
    start = torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
    steps = min(steps, like.shape[1])
    krylov = Krylov(start, steps)
    for _ in range(steps):
        krylov.extend(apply(krylov.last()))
    return krylov.matrix[:, :steps, :steps]


def is_minimum(at: Linearisation, x: Tensor) -> Tensor:
    """Whether the Hessian shows no negative eigenvalue to a few Lanczos steps, per sample."""
    if not x.numel():
        return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    with torch.no_grad(), no_autocast(x.device):
        # A generator of its own: looking at a result must not change anybody's random numbers.
        matrix = arnoldi(lambda v: -at.transposed(v), x, STEPS, torch.Generator().manual_seed(0))
        finite = matrix.isfinite().flatten(1).all(1)
        symmetric = torch.where(finite.view(-1, 1, 1), (matrix + matrix.mT) / 2, 0.0)
        eigenvalues = torch.linalg.eigvalsh(symmetric)
    upward: Tensor = eigenvalues[:, 0] >= -NEGATIVE * eigenvalues.abs().amax(1)
    return ~finite | upward
