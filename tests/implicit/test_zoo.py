"""Hard problems: each is solved with the right gradient, or it is said that it may be wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import scrimp
from scrimp.adjoints import Implicit, JacobianFree, Phantom
from scrimp.errors import ConvergenceWarning, GradientWarning
from scrimp.solvers import GMRES, Anderson, Neumann, Picard

DOUBLE = torch.float64


def linear_problem(matrix, **options):
    """Solve x = A x + c; the relative error of the gradient of sum(x · w) in c against a dense solve."""
    n = matrix.shape[0]
    generator = torch.Generator().manual_seed(0)
    c = torch.randn(n, generator=generator, dtype=DOUBLE).to(matrix.dtype).requires_grad_()
    w = torch.randn(n, generator=generator, dtype=DOUBLE)
    x, info = scrimp.fixed_point(lambda x, c: matrix @ x + c, torch.zeros_like(c), c, **options)
    (found,) = torch.autograd.grad((x * w.to(x.dtype)).sum(), c)
    exact, singular = torch.linalg.solve_ex((torch.eye(n, dtype=DOUBLE) - matrix.double()).mT, w)
    if singular:
        return float("inf"), info
    return float((found.double() - exact).norm() / exact.norm()), info


def assert_right_or_warned(compute, limit):
    """``compute`` returns an error of at most ``limit``, or it warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = compute()
    said = any(issubclass(w.category, ConvergenceWarning | GradientWarning) for w in caught)
    assert said or error <= limit, f"silently wrong: error {error:.1e}"
    return said, error


def test_assert_right_or_warned_fails_on_silent_errors():
    """The helper notices a large error without a warning."""
    with pytest.raises(AssertionError, match="silently wrong"):
        assert_right_or_warned(lambda: 0.5, 1e-6)


def test_eigenvalue_beyond_minus_one():
    """An eigenvalue of −1.5, where plain iteration diverges, is solved exactly."""
    error, info = linear_problem(torch.diag(torch.tensor([-1.5, 0.3, -0.2], dtype=DOUBLE)))
    assert info.all_converged
    assert error < 1e-8


def test_plain_steps_are_damped_until_they_converge():
    """Picard on an eigenvalue of −1.5 retreats to smaller steps rather than diverge."""
    error, info = linear_problem(torch.diag(torch.tensor([-1.5, 0.3], dtype=DOUBLE)), solver=Picard())
    assert info.all_converged
    assert error < 1e-8


def test_eigenvalues_far_outside():
    """Eigenvalues of many sizes and signs, none near one, are solved exactly."""
    eigenvalues = torch.tensor([-20.0, -3.0, -1.5, 0.5, 2.0, 3.0], dtype=DOUBLE)
    error, info = linear_problem(torch.diag(eigenvalues))
    assert info.all_converged
    assert error < 1e-8


@pytest.mark.parametrize("coupling", [3.0, 30.0])
def test_non_normal_jacobian(coupling):
    """A Jacobian with tiny eigenvalues and huge transients is solved exactly, or warned about."""
    matrix = torch.diag(torch.full((12,), 0.5, dtype=DOUBLE))
    matrix += torch.diag(torch.full((11,), coupling, dtype=DOUBLE), 1)
    assert_right_or_warned(lambda: linear_problem(matrix)[0], 1e-5)


def test_mildly_non_normal_jacobian_is_exact():
    """A non-normal Jacobian on which truncated series are half wrong is solved exactly."""
    matrix = torch.diag(torch.full((10,), 0.5, dtype=DOUBLE)) + torch.diag(torch.full((9,), 1.0, dtype=DOUBLE), 1)
    error, info = linear_problem(matrix)
    assert info.all_converged
    assert error < 1e-7


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_near_singular(gap, dtype):
    """An eigenvalue ever nearer to one is solved, or warned about."""
    matrix = torch.diag(torch.tensor([1 - gap, 0.5, -0.3], dtype=DOUBLE)).to(dtype)
    assert_right_or_warned(lambda: linear_problem(matrix)[0], 3e-4 if dtype == torch.float32 else 1e-7)


def test_truncated_series_warns():
    """A Neumann series that is far from its limit says so."""
    matrix = torch.diag(torch.tensor([0.99, 0.5], dtype=DOUBLE))
    with pytest.warns(GradientWarning, match="estimated error"):
        linear_problem(matrix, adjoint=Implicit(Neumann(50)))


def test_diverging_series_warns():
    """A Neumann series of an eigenvalue of −1.5 says that it is wrong."""
    matrix = torch.diag(torch.tensor([-1.5, 0.5], dtype=DOUBLE))
    with pytest.warns(GradientWarning):
        linear_problem(matrix, adjoint=Implicit(Neumann(50)))


def test_long_enough_series_is_silent_and_right():
    """A Neumann series on a strong contraction is exact."""
    error, _ = linear_problem(torch.diag(torch.tensor([0.3, -0.2], dtype=DOUBLE)), adjoint=Implicit(Neumann(40)))
    assert error < 1e-9


@pytest.mark.parametrize("adjoint", [JacobianFree(), Phantom(3, 0.9)])
def test_approximations_warn_where_they_point_astray(adjoint):
    """Approximate adjoints, silent on contractions, warn where f is none."""
    linear_problem(torch.diag(torch.tensor([0.6, 0.5], dtype=DOUBLE)), adjoint=adjoint)
    with pytest.warns(GradientWarning, match="contraction"):
        linear_problem(torch.diag(torch.tensor([-1.5, -1.4], dtype=DOUBLE)), adjoint=adjoint)


def test_too_few_products_warn():
    """A linear solver that is cut short says that the gradient may be wrong."""
    matrix = torch.diag(torch.linspace(-0.9, 0.9, 30, dtype=DOUBLE))
    with pytest.warns(GradientWarning):
        linear_problem(matrix, adjoint=Implicit(GMRES(max_products=5)))


def test_chaotic_map():
    """The logistic map at r = 4, whose fixed points repel, is solved with its gradient or warned about."""

    def compute():
        r = torch.full((20,), 4.0, dtype=DOUBLE, requires_grad=True)
        x0 = torch.linspace(0.05, 0.95, 20, dtype=DOUBLE)
        x, _ = scrimp.fixed_point(lambda x, r: r * x * (1 - x), x0, r, batch_dims=1)
        (found,) = torch.autograd.grad(x.sum(), r)
        # Either fixed point counts: 0, whose derivative is 0, and 1 − 1/r, whose derivative is 1/r².
        expected = torch.where(x.detach().abs() < 0.1, 0.0, 1 / 16)
        return float((found - expected).abs().max())

    assert_right_or_warned(compute, 1e-8)


def test_no_solution_warns():
    """An equation without a solution is never reported as solved."""
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        _, info = scrimp.fixed_point(lambda x: x + 1 + x**2, torch.zeros((), dtype=DOUBLE))
    assert not info.all_converged


def test_nan_everywhere_warns():
    """A function that gives NaN is reported as such."""
    with pytest.warns(ConvergenceWarning, match="not finite"):
        _, info = scrimp.fixed_point(lambda x: x * torch.nan, torch.ones(3))
    assert not info.all_converged


def test_nan_after_some_steps_keeps_the_best_state():
    """Where steps leave the domain of f, the state returned is the best one seen, and finite."""
    with pytest.warns(ConvergenceWarning):
        x, info = scrimp.fixed_point(lambda x: -3 - torch.log(x), torch.tensor(0.9, dtype=DOUBLE), max_steps=3)
    assert bool(x.isfinite())
    assert bool(info.residual.isfinite())


@pytest.mark.parametrize("solver", [Anderson(), Picard()])
def test_one_bad_sample_does_not_spoil_the_others(solver):
    """A sample without a solution is named; the others have the bits of a batch without it."""
    c = torch.linspace(0.1, 0.5, 6, dtype=DOUBLE).unsqueeze(1).repeat(1, 4)
    bad = c.clone()
    bad[2] = torch.nan

    def solve(c):
        c = c.clone().requires_grad_()
        x, info = scrimp.fixed_point(
            lambda x: torch.tanh(0.5 * x + c), torch.zeros_like(c), batch_dims=1, solver=solver
        )
        keep = torch.tensor([0, 1, 3, 4, 5])
        return x, info, torch.autograd.grad(x[keep].sum(), c)[0][keep]

    x, _, gradient = solve(c)
    with pytest.warns(ConvergenceWarning, match=r"1 of 6 samples \(2\)"):
        x_bad, info, gradient_bad = solve(bad)
    good = torch.tensor([0, 1, 3, 4, 5])
    assert info.converged.tolist() == [True, True, False, True, True, True]
    torch.testing.assert_close(x_bad[good], x[good], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient_bad, gradient, rtol=1e-9, atol=0)


def test_diverging_sample_does_not_spoil_the_others():
    """A sample that runs to infinity is frozen at its best state while the others converge."""
    slope = torch.tensor([0.5, 3.0, 0.2], dtype=DOUBLE)
    offset = torch.tensor([1.0, 1.0, 1.0], dtype=DOUBLE)
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 samples \(1\)"):
        x, info = scrimp.fixed_point(lambda x: slope * x.abs() + offset, torch.zeros(3, dtype=DOUBLE), batch_dims=1)
    assert info.converged.tolist() == [True, False, True]
    torch.testing.assert_close(x[[0, 2]], torch.tensor([2.0, 1.25], dtype=DOUBLE))


def test_nan_cotangent_stays_nan():
    """A gradient that arrives as NaN leaves as NaN, and is warned about."""
    c = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
    x, _ = scrimp.fixed_point(lambda x: 0.5 * x + c, torch.zeros_like(c), batch_dims=1)
    upstream = torch.ones_like(x)
    upstream[1, 0] = torch.nan
    with pytest.warns(GradientWarning, match=r"came in for 1 of 2 samples \(1\) is not finite"):
        (found,) = torch.autograd.grad(x, c, upstream)
    assert bool(found[1].isnan().all())
    torch.testing.assert_close(found[0], torch.full((3,), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize(("shape", "batch_dims"), [((0, 4), 1), ((3, 0), 1), ((0,), 0), ((0, 4), 0)])
def test_zero_size(shape, batch_dims):
    """States without elements are solved, and their graph reaches the parameters."""
    c = torch.ones(shape, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    x, info = scrimp.fixed_point(lambda x: scale * x + c, torch.zeros(shape), batch_dims=batch_dims)
    x.sum().backward()
    assert info.all_converged
    assert x.shape == shape
    assert scale.grad == 0


def test_scalar():
    """A state of no dimensions is solved, with the derivative of the implicit function."""
    a = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    x, info = scrimp.fixed_point(lambda x, a: torch.cos(a * x), torch.zeros((), dtype=DOUBLE), a)
    x.backward()
    sine = torch.sin(x.detach())
    assert info.converged.shape == ()
    torch.testing.assert_close(a.grad, -x.detach() * sine / (1 + sine))


def test_solution_zero():
    """A solution that is zero is reached although the tolerance is relative."""
    c = torch.zeros(4, dtype=DOUBLE, requires_grad=True)
    x, info = scrimp.fixed_point(lambda x, c: 0.5 * torch.sin(x) + c, torch.ones(4, dtype=DOUBLE), c)
    (found,) = torch.autograd.grad(x.sum(), c)
    assert info.all_converged
    torch.testing.assert_close(found, torch.full((4,), 2.0, dtype=DOUBLE), rtol=1e-8, atol=0)


@pytest.mark.parametrize("start", [1e6, -1e6])
def test_tiny_solution_from_a_far_start(start):
    """A start a million times larger than the solution does not loosen the tolerance."""
    c = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    x, _ = scrimp.fixed_point(lambda x, c: 0.9 * x + 0.1 * torch.cos(c), torch.tensor(start, dtype=DOUBLE), c)
    torch.testing.assert_close(x.detach(), torch.cos(c.detach()), rtol=1e-8, atol=0)


@pytest.mark.parametrize("unit", [1e-30, 1e-22, 1e22, 1e30])
def test_states_whose_squares_are_out_of_range(unit):
    """Single-precision states and gradients whose squares vanish or overflow are as precise as others."""
    matrix = torch.tensor([[0.5, 0.2, 0.1], [-0.3, 0.6, 0.2], [0.0, 0.4, 0.7]])
    c = (torch.tensor([0.3, 0.5, -0.2]) * unit).requires_grad_()
    x, info = scrimp.fixed_point(lambda x: matrix @ x + c, torch.zeros(3))
    (found,) = torch.autograd.grad(x, c, torch.full((3,), 1 / unit))
    system = torch.eye(3) - matrix
    assert info.all_converged
    torch.testing.assert_close(x / unit, torch.linalg.solve(system, c / unit), rtol=1e-5, atol=0)
    torch.testing.assert_close(found * unit, torch.linalg.solve(system.mT, torch.ones(3)), rtol=1e-5, atol=0)


def test_residual_that_is_zero_by_rounding_is_not_believed():
    """An equation so nearly singular that rounding hides its residual is warned about."""
    slope = torch.tensor(1 - 2**-50, dtype=DOUBLE)
    c = torch.tensor(3.0, dtype=DOUBLE, requires_grad=True)
    x, _ = scrimp.fixed_point(lambda x: slope * x + c, 3 * torch.tensor(2.0**50, dtype=DOUBLE))
    with pytest.warns(GradientWarning):
        x.backward()


def test_estimated_errors_are_warned_about_from_a_multiple_of_the_tolerance_on():
    """A tolerance of 1e-6 is silent where it stands for an error of 1e-5, and said where for one of 1e-3."""

    def solve(slope):
        c = torch.ones((), dtype=DOUBLE)
        return scrimp.fixed_point(
            lambda x: slope * x + c, torch.zeros_like(c), solver=Picard(), rtol=1e-6, max_steps=20_000
        )[1]

    assert solve(0.9).all_converged
    with pytest.warns(ConvergenceWarning, match="nearly singular"):
        info = solve(0.999)
    assert info.all_converged
    assert 3e-4 < float(info.state_error) < 3e-3


def test_solution_whose_residual_rounds_to_zero_is_not_believed():
    """What rounding may hide where the solution is a million times as far as the first residual is said, in forward."""
    slope = torch.tensor(1 - 2**-20)
    with pytest.warns(ConvergenceWarning, match="nearly singular"):
        _, info = scrimp.fixed_point(lambda x: slope * x + 1, torch.zeros(()))
    assert float(info.residual) == 0


def test_physical_units():
    """A state of size 1e-12 is solved to relative precision."""
    c = torch.tensor([3e-12, 5e-12], dtype=DOUBLE, requires_grad=True)
    x, _ = scrimp.fixed_point(lambda x, c: 0.5 * x + c, torch.zeros(2, dtype=DOUBLE), c)
    torch.testing.assert_close(x.detach(), 2 * c.detach(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Half-precision states are solved to what their dtype allows; the gradient is near, or warned about."""
    torch.manual_seed(0)
    W = torch.randn(16, 16) * 0.1

    def solve(dtype):
        weight = W.to(dtype).requires_grad_()
        x, info = scrimp.fixed_point(
            lambda x: torch.tanh(x @ weight + 0.5), torch.zeros(4, 16, dtype=dtype), batch_dims=1
        )
        return x, info, torch.autograd.grad(x.float().sum(), weight)[0]

    exact = solve(DOUBLE)[2]
    x, info, _ = solve(dtype)
    assert x.dtype == dtype
    assert info.all_converged
    assert info.rtol == pytest.approx(4 * torch.finfo(dtype).eps)

    def error():
        return float((solve(dtype)[2].double() - exact).norm() / exact.norm())

    assert_right_or_warned(error, 0.05)


def test_autocast_keeps_the_state_single_and_the_gradient():
    """Under autocast f computes in half precision, the state does not, and weights get their gradients."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    with torch.no_grad():
        linear.weight.mul_(0.3)
    seen = []

    def f(x):
        y = torch.tanh(linear(x))
        seen.append((x.dtype, y.dtype))
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, info = scrimp.fixed_point(f, torch.zeros(4, 16), batch_dims=1)
    x.sum().backward()
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert x.dtype == torch.float32
    assert info.all_converged
    reduced = linear.weight.grad.clone()
    linear.weight.grad = None
    scrimp.fixed_point(lambda x: torch.tanh(linear(x)), torch.zeros(4, 16), batch_dims=1)[0].sum().backward()
    assert float((reduced - linear.weight.grad).norm() / linear.weight.grad.norm()) < 0.03


def test_coupled_samples_warn_or_are_right():
    """Samples that depend on each other, wrongly called a batch, do not pass for solved unless they are."""

    def compute():
        torch.manual_seed(0)
        mix = torch.randn(8, 8, dtype=DOUBLE) * 0.3
        c = torch.randn(8, 3, dtype=DOUBLE, requires_grad=True)
        f = lambda x: torch.tanh(mix @ x + c)  # noqa: E731
        exact, _ = scrimp.fixed_point(f, torch.zeros(8, 3, dtype=DOUBLE))
        (expected,) = torch.autograd.grad(exact.sum(), c)
        x, _ = scrimp.fixed_point(f, torch.zeros(8, 3, dtype=DOUBLE), batch_dims=1)
        (found,) = torch.autograd.grad(x.sum(), c)
        return float((found - expected).norm() / expected.norm())

    assert_right_or_warned(compute, 1e-7)


def test_argmin_at_a_maximum_warns():
    """A stationary point that is no minimum does not pass for one."""
    with pytest.warns(ConvergenceWarning, match="minimum"):
        scrimp.argmin(lambda x: torch.cos(x).sum(), torch.zeros(3, dtype=DOUBLE))


def test_root_far_from_the_solution():
    """A line search brings Newton's method to a root that full steps would miss."""
    a = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    x, info = scrimp.root(lambda x, a: torch.atan(x - a), torch.tensor(20.0, dtype=DOUBLE), a)
    x.backward()
    assert info.all_converged
    torch.testing.assert_close(a.grad, torch.ones_like(a.grad))


def test_implicit_refuses_to_pass_a_wrong_solution():
    """A state given as a solution that is none is warned about."""
    with pytest.warns(ConvergenceWarning):
        scrimp.implicit(torch.tensor(1.5, dtype=DOUBLE), lambda x: x**2 - 2)
