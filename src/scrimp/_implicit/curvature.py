"""Eigenvalues of Jacobians, seen through products with random vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .equation import Linearisation, no_autocast
from .krylov import Apply, Krylov
from .problem import Function, fixed_point_equation
from .state import Tree, layout_of
from .tolerance import euclidean

# Extreme eigenvalues show within few steps.
STEPS = 10
# Curvature this far below zero, relative to the largest, is not rounding.
NEGATIVE = 1e-4


def arnoldi(apply: Apply, like: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Each sample's matrix of ``apply`` in the Krylov space of a random vector, of shape (samples, k, k)."""
    start = torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
    steps = min(steps, like.shape[1])
    krylov = Krylov(start, steps)
    for _ in range(steps):
        krylov.extend(apply(krylov.last()))
    return krylov.matrix[:, :steps, :steps]


@dataclass(frozen=True, slots=True)
class Arnoldi:
    """Estimate a spectral radius by the largest Ritz value of a Krylov space: right for complex spectra.

    Attributes:
        steps: Dimension of the space, and so the number of products with the Jacobian.
    """

    steps: int = 20


@dataclass(frozen=True, slots=True)
class NormGrowth:
    """Estimate a spectral radius by how fast repeated products grow: two states held, but slower to converge.

    Attributes:
        steps: How many products; the growth over the second half of them counts.
    """

    steps: int = 60


ARNOLDI = Arnoldi()


def spectral_radius(
    f: Function,
    x: Tree,
    *args: Tree,
    batch_dims: int = 0,
    method: Arnoldi | NormGrowth = ARNOLDI,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Estimate the spectral radius of f's Jacobian at a state: below one, plain iteration converges nearby.

    Args:
        f: Gives the next state from a state and ``args``.
        x: The state.
        *args: Passed on to f.
        batch_dims: How many leading dimensions count independent samples.
        method: How it is estimated.
        generator: Draws the first vectors, on the CPU; None for one with a fixed seed.

    Returns:
        One estimate a sample, without a graph.

    Example:
        >>> import torch
        >>> from scrimp.jacobian import spectral_radius
        >>> turn = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
        >>> print(f"{spectral_radius(lambda x: turn @ x, torch.zeros(2)):.3f}")
        0.900
    """
    layout = layout_of(x, batch_dims)
    equation = fixed_point_equation(lambda state: f(state, *args), layout)
    flat = layout.flat(x, "x").detach()
    at = Linearisation(equation, flat)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    with torch.no_grad(), no_autocast(layout.device):
        if not flat.numel():
            return layout.per_sample(flat.new_zeros(layout.samples, dtype=torch.float64))

        def product(v: Tensor) -> Tensor:
            return v - at.transposed(v)

        if isinstance(method, Arnoldi):
            matrix = arnoldi(product, flat, method.steps, generator)
            # On the CPU: not every build of torch has eigenvalues of general matrices elsewhere.
            largest: Tensor = torch.linalg.eigvals(matrix.cpu()).abs().amax(1)
            return layout.per_sample(largest).to(layout.device)
        return layout.per_sample(_norm_growth(product, flat, method.steps, generator))


def jacobian_penalty(
    f: Function,
    x: Tree,
    *args: Tree,
    batch_dims: int = 0,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Hutchinson's estimate of f's Jacobian's squared Frobenius norm over its size, to add to a loss.

    Keeps a fixed point easy to find while its layer is trained. Differentiable with respect to x and all that
    f depends on; f must be differentiable twice.

    Args:
        f: Gives the next state from a state and ``args``.
        x: The state, usually a solution.
        *args: Passed on to f.
        batch_dims: How many leading dimensions count independent samples.
        samples: How many random vectors to average over.
        generator: Draws the vectors, on the CPU; None for torch's own.

    Returns:
        One estimate a sample.

    Example:
        >>> import torch
        >>> from scrimp.jacobian import jacobian_penalty
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> x = torch.zeros(4)
        >>> drawn = torch.Generator().manual_seed(0)
        >>> print(f"{jacobian_penalty(lambda x: scale * x, x, samples=200, generator=drawn).item():.1f}")
        0.3
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1; have {samples}")
    layout = layout_of(x, batch_dims)
    equation = fixed_point_equation(lambda state: f(state, *args), layout)
    with torch.enable_grad():
        flat = layout.flat(x, "x")
        point = flat if flat.requires_grad else flat.detach().requires_grad_()
        image = equation.function(point)
        total = flat.new_zeros(layout.samples)
        for _ in range(samples):
            v = torch.randn(flat.shape, generator=generator, dtype=flat.dtype).to(flat.device)
            if image.requires_grad:
                (pulled,) = torch.autograd.grad(image, point, v, create_graph=True, materialize_grads=True)
                total = total + pulled.square().sum(1)
    return layout.per_sample(total / (samples * max(layout.columns, 1)))


def _norm_growth(product: Apply, like: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
    growth = torch.zeros(like.shape[0], dtype=torch.float64, device=like.device)
    half = steps // 2
    for step in range(steps):
        v = v / euclidean(v).clamp_min(torch.finfo(v.dtype).tiny).unsqueeze(1)
        v = product(v)
        if step >= half:
            growth = growth + euclidean(v).double().log()
    return (growth / (steps - half)).exp()


def is_minimum(at: Linearisation, x: Tensor) -> Tensor:
    """Whether the Hessian shows no negative eigenvalue to a few Lanczos steps, per sample."""
    if not x.numel():
        return torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    with torch.no_grad(), no_autocast(x.device):
        # A generator of its own: looking at a result must not change anybody's random numbers.
        matrix = arnoldi(at.transposed, x, STEPS, torch.Generator().manual_seed(0))
        finite = matrix.isfinite().flatten(1).all(1)
        symmetric = torch.where(finite.view(-1, 1, 1), (matrix + matrix.mT) / 2, 0.0)
        eigenvalues = torch.linalg.eigvalsh(symmetric)
    upward: Tensor = eigenvalues[:, 0] >= -NEGATIVE * eigenvalues.abs().amax(1)
    return ~finite | upward
