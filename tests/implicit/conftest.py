"""Problems with known solutions and known gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class TanhLayer:
    """x = tanh(W x + U p + b) for a batch of p, with the exact solution and gradient."""

    W: Tensor
    U: Tensor
    b: Tensor
    p: Tensor
    cotangent: Tensor
    solution: Tensor
    gradient: Tensor

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """W, U, b, p as leaves that require grad."""
        return tuple(t.to(dtype).requires_grad_() for t in (self.W, self.U, self.b, self.p))


def tanh_layer(spectrum: str, radius: float, n: int = 64, batch: int = 32, seed: int = 0) -> TanhLayer:
    """A layer whose Jacobian at the solution has this spectral radius in its worst sample.

    ``complex``: a Gaussian matrix. ``real``: symmetric, with eigenvalues spread evenly between both ends.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if spectrum == "complex":
        W = normal(n, n) / n**0.5
    else:
        basis = torch.linalg.qr(normal(n, n)).Q
        W = basis @ torch.diag(torch.linspace(-1, 1, n, dtype=torch.float64)) @ basis.T
    U, b, p = normal(n, n) / n**0.5, normal(n) * 0.1, normal(batch, n) * 0.1
    W = W * radius / torch.linalg.eigvals(W).abs().max()
    for _ in range(6):
        x = _solve(W, U, b, p)
        W = W * (radius / torch.linalg.eigvals((1 - x**2).unsqueeze(2) * W).abs().max())
    x = _solve(W, U, b, p)
    slope = 1 - x**2
    cotangent = normal(batch, n)
    system = torch.eye(n, dtype=torch.float64) - slope.unsqueeze(2) * W
    v = torch.linalg.solve(system.mT, cotangent.unsqueeze(2)).squeeze(2) * slope
    gradient = torch.cat([(v.T @ x).flatten(), (v.T @ p).flatten(), v.sum(0), (v @ U).flatten()])
    return TanhLayer(W, U, b, p, cotangent, x, gradient)


def _solve(W: Tensor, U: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """Newton's method with dense matrices, from a rough plain iteration."""
    x = torch.zeros_like(p)
    offset = p @ U.T + b
    for _ in range(300):
        x = torch.tanh(x @ W.T + offset)
    eye = torch.eye(W.shape[0], dtype=W.dtype)
    for _ in range(12):
        fx = torch.tanh(x @ W.T + offset)
        system = eye - (1 - fx**2).unsqueeze(2) * W
        x = x + torch.linalg.solve(system, (fx - x).unsqueeze(2)).squeeze(2)
    return x


@pytest.fixture(scope="session")
def layer() -> Callable[[str, float], TanhLayer]:
    """Makes a tanh layer, once for each pair of spectrum and radius."""
    made: dict[tuple[str, float], TanhLayer] = {}

    def get(spectrum: str, radius: float) -> TanhLayer:
        if (spectrum, radius) not in made:
            made[spectrum, radius] = tanh_layer(spectrum, radius)
        return made[spectrum, radius]

    return get
