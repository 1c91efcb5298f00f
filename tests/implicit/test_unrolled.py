"""Derivatives through steps: recorded, checkpointed or reversed."""

from __future__ import annotations

import pytest
import torch

import scrimp
from scrimp.adjoints import Reversible, Unroll
from scrimp.errors import AdjointError, ConvergenceError, GradientWarning
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


@pytest.mark.parametrize("adjoint", [Unroll(), Unroll(checkpoint=False), Reversible(0.3)])
@pytest.mark.parametrize("nearness", [0.0, 1e-7])
def test_a_start_near_the_solution_warns(tensors, adjoint, nearness):
    """Few or no steps carry only a part of the derivative, which backward says."""
    W, p = tensors
    with torch.no_grad():
        solution, _ = scrimp.fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), W, p, batch_dims=1)
    options = {"solver": Picard()} if isinstance(adjoint, Unroll) else {}
    x, _ = scrimp.fixed_point(f, solution + nearness, W, p, batch_dims=1, adjoint=adjoint, rtol=1e-6, **options)
    with pytest.warns(GradientWarning, match="steps carry a derivative"):
        x.sum().backward()


@pytest.mark.parametrize("adjoint", [Unroll(), Reversible(0.2)])
def test_what_steps_did_not_carry_is_measured(adjoint):
    """For a linear map the residual that is reported is the power of its slope that was taken."""
    slope, c = 0.2, torch.ones(1, 1, dtype=DOUBLE, requires_grad=True)
    options = {"solver": Picard()} if isinstance(adjoint, Unroll) else {}
    x, info = scrimp.fixed_point(
        lambda x, c: slope * x + c, torch.zeros(1, 1, dtype=DOUBLE), c, batch_dims=1, adjoint=adjoint, rtol=1e-4,
        **options,
    )  # fmt: skip
    x.sum().backward()
    # The series' sum is 1 / (1 − slope), less what is left.
    assert info.backward.vjps == int(info.steps)
    torch.testing.assert_close((1 - info.backward.residual) / (1 - slope), c.grad[0], rtol=1e-12, atol=0)
    assert bool(info.backward.solved)


def test_a_slow_direction_that_the_start_lacks_warns():
    """A derivative along a slow direction needs more steps than a start without a share in it does."""
    slopes = torch.tensor([0.1, 0.99], dtype=DOUBLE)
    c = torch.tensor([1.0, 0.0], dtype=DOUBLE, requires_grad=True)
    x, info = scrimp.fixed_point(
        lambda x: slopes * x + c, torch.zeros(2, dtype=DOUBLE), solver=Picard(), adjoint=Unroll()
    )
    assert info.all_converged
    with pytest.warns(GradientWarning, match="steps carry a derivative"):
        x.sum().backward()


def test_steps_that_fall_short_can_raise():
    """With on_fail="raise" a derivative that is cut short is an error."""
    c = torch.ones(2, dtype=DOUBLE, requires_grad=True)
    options = {"solver": Picard(), "adjoint": Unroll(), "on_fail": "raise"}
    x, _ = scrimp.fixed_point(lambda x: 0.5 * x + c, torch.full((2,), 2.0, dtype=DOUBLE), **options)
    with pytest.raises(ConvergenceError, match="steps carry"):
        x.sum().backward()


def test_second_derivatives_of_unrolled_steps(tensors):
    """A backward through a backward is right, and silent, whether or not it comes in at the last step."""
    W, p = tensors
    x, _ = scrimp.fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), W, p, batch_dims=1, solver=Picard(), adjoint=Unroll())
    (first,) = torch.autograd.grad(x.square().sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), W)
    y, _ = scrimp.fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), W, p, batch_dims=1, order=2)
    (first,) = torch.autograd.grad(y.square().sum(), p, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), W)
    torch.testing.assert_close(second, expected, rtol=1e-6, atol=1e-7)


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
