"""Derivatives through steps: recorded, checkpointed or reversed."""

from __future__ import annotations

import pytest
import torch

import scrimp
from scrimp.adjoints import Reversible, Unroll
from scrimp.errors import AdjointError
from scrimp.solvers import Picard

DOUBLE = torch.float64


@pytest.fixture
def tensors():
    """W and p of a strong contraction, in double precision."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(4, 4, generator=generator, dtype=DOUBLE) * 0.1
    return W.requires_grad_(), torch.randn(3, 4, generator=generator, dtype=DOUBLE).requires_grad_()


def f(x, W, p):
    """A contraction."""
    return torch.tanh(x @ W + p)


def gradients(tensors, **options):
    """Gradients of a sum of squares at the solution, and the record."""
    x, info = scrimp.fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), *tensors, batch_dims=1, **options)
    return torch.autograd.grad(x.square().sum(), tensors), info


@pytest.mark.parametrize(
    "options",
    [
        {"adjoint": Unroll(), "solver": Picard()},
        {"adjoint": Unroll(checkpoint=False), "solver": Picard(0.8)},
        {"adjoint": Reversible(0.5), "rtol": 1e-5},
    ],
)
def test_gradients_agree_with_the_implicit_ones(tensors, options):
    """Steps give the implicit gradient as far as they converged."""
    found, info = gradients(tensors, **options)
    expected, _ = gradients(tensors)
    assert info.all_converged
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_checkpoints_do_not_change_the_bits(tensors):
    """Recomputed steps have the gradient of recorded ones."""
    with_them, _ = gradients(tensors, adjoint=Unroll(), solver=Picard())
    without, _ = gradients(tensors, adjoint=Unroll(checkpoint=False), solver=Picard())
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))


def test_unrolling_needs_plain_steps(tensors):
    """Accelerated steps are not unrolled."""
    with pytest.raises(AdjointError, match="Picard"):
        gradients(tensors, adjoint=Unroll())


def test_reversible_refuses_what_rounding_would_spoil(tensors):
    """More steps than can be reconstructed raise, naming how many would be allowed."""
    with pytest.raises(AdjointError, match="allows 9 steps"):
        gradients(tensors, adjoint=Reversible(0.8), rtol=1e-13)


@pytest.mark.parametrize(("coupling", "dtype"), [(0.5, DOUBLE), (0.8, torch.float32), (0.1, torch.float32)])
def test_allowed_steps_keep_the_loss_below_a_thousandth(coupling, dtype):
    """The number of steps allowed is the last for which (1−β)^(−2k)·eps is at most 1e-3."""
    from scrimp._implicit.unrolled import allowed_steps

    steps, eps = allowed_steps(coupling, dtype), torch.finfo(dtype).eps
    assert (1 - coupling) ** (-2 * steps) * eps <= 1e-3 < (1 - coupling) ** (-2 * (steps + 1)) * eps


def test_reversible_refuses_closures(tensors):
    """Parameters that are not listed cannot get gradients from reversed steps, and are an error."""
    W, p = tensors
    with pytest.raises(AdjointError, match="closes over"):
        scrimp.fixed_point(lambda x: f(x, W, p), torch.zeros(3, 4, dtype=DOUBLE), adjoint=Reversible())


def test_reversible_refuses_roots(tensors):
    """Roots have no steps to reverse."""
    with pytest.raises(AdjointError, match="fixed point"):
        scrimp.root(lambda x, a: x - a, torch.zeros(3, 4, dtype=DOUBLE), tensors[1], adjoint=Reversible())
