"""How near solutions and gradients come to exact ones, and with how many evaluations."""

from __future__ import annotations

import pytest
import torch

import scrimp
from scrimp.adjoints import Implicit
from scrimp.solvers import GMRES, Anderson, BiCGSTAB, Broyden, Dense, NewtonKrylov, Picard

COLUMNS = [("complex", 0.5), ("complex", 0.9), ("complex", 0.99), ("real", 0.9), ("real", 0.99)]
COSTS = {
    ("complex", 0.5): (19, 18),
    ("complex", 0.9): (42, 40),
    ("complex", 0.99): (50, 48),
    ("real", 0.9): (30, 26),
    ("real", 0.99): (80, 50),
}


def gradient_error(problem, dtype, rtol, **options):
    """Relative error of the whole gradient, and the record of the solve."""
    W, U, b, p = problem.leaves(dtype)
    x0 = torch.zeros(p.shape, dtype=dtype)
    x, info = scrimp.fixed_point(lambda x: torch.tanh(x @ W.T + p @ U.T + b), x0, batch_dims=1, rtol=rtol, **options)
    gradients = torch.autograd.grad((x * problem.cotangent.to(dtype)).sum(), (W, U, b, p))
    found = torch.cat([g.flatten() for g in gradients]).double()
    return float((found - problem.gradient).norm() / problem.gradient.norm()), info


@pytest.mark.parametrize(("spectrum", "radius"), COLUMNS)
def test_double_precision_gradients_are_exact_to_tolerance(layer, spectrum, radius):
    """At rtol 1e-10 the gradient's error is at most 1e-9, and 1e-8 at radius 0.99."""
    error, _ = gradient_error(layer(spectrum, radius), torch.float64, 1e-10)
    assert error <= (1e-8 if radius == 0.99 else 1e-9)


@pytest.mark.parametrize(("spectrum", "radius"), COLUMNS)
def test_single_precision_gradients_are_exact_to_tolerance(layer, spectrum, radius):
    """At rtol 1e-6 the gradient's error is at most 2e-6, and 1e-4 at radius 0.99."""
    error, _ = gradient_error(layer(spectrum, radius), torch.float32, 1e-6)
    assert error <= (1e-4 if radius == 0.99 else 2e-6)


@pytest.mark.parametrize(("spectrum", "radius"), COLUMNS)
def test_evaluations_stay_within_their_limits(layer, spectrum, radius):
    """Forward evaluations and backward products, re-checks included, stay within known good counts."""
    _, info = gradient_error(layer(spectrum, radius), torch.float32, 1e-6)
    forward, backward = COSTS[spectrum, radius]
    assert info.total_evaluations <= forward
    assert info.backward.vjps <= backward


@pytest.mark.parametrize("solver", [Picard(), Picard(0.7), Anderson(), Anderson(5, 0.8), Broyden(), NewtonKrylov()])
def test_every_solver_finds_the_solution(layer, solver):
    """Each solver reaches the exact solution at radius 0.9."""
    problem = layer("complex", 0.9)
    W, U, b, p = problem.W, problem.U, problem.b, problem.p
    x, info = scrimp.fixed_point(
        lambda x: torch.tanh(x @ W.T + p @ U.T + b),
        torch.zeros_like(p),
        batch_dims=1,
        solver=solver,
        max_steps=500,
    )
    assert info.all_converged
    torch.testing.assert_close(x, problem.solution, rtol=0, atol=1e-8)


@pytest.mark.parametrize("linear", [GMRES(), GMRES(restart=12), BiCGSTAB(), Anderson(), Anderson(15), Dense()])
def test_every_linear_solver_gives_the_gradient(layer, linear):
    """Each solver of the adjoint equation reaches the exact gradient at radius 0.9."""
    error, info = gradient_error(layer("complex", 0.9), torch.float64, 1e-10, adjoint=Implicit(linear))
    assert bool(info.backward.solved.all())
    assert error <= 1e-8


def test_restarted_gmres_keeps_its_tolerance(layer):
    """Cycles go on until the true residual of every sample is within the tolerance, where rounding allows it."""
    adjoint = Implicit(GMRES(restart=6))
    _, info = gradient_error(layer("complex", 0.9), torch.float64, 1e-10, adjoint=adjoint)
    assert float(info.backward.residual.max()) <= 1e-10


def test_gmres_does_not_fight_rounding():
    """A system whose condition puts the tolerance below rounding costs not many more products than unknowns."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, 50, generator=generator)).Q
    matrix = basis @ torch.diag(torch.linspace(0.005, 1.995, 50)) @ basis.T
    rhs = torch.randn(32, 50, generator=generator)
    found = GMRES().solve(lambda v: v @ matrix, rhs, None, 1e-6)
    exact = torch.linalg.solve(matrix.double().T, rhs.double().T).T
    assert found.products <= 110
    assert float((found.x - exact).norm() / exact.norm()) <= 1e-5


def test_budget_chooses_bicgstab(layer):
    """Where GMRES's basis does not fit the budget the adjoint is solved by BiCGSTAB, as exactly."""
    problem = layer("complex", 0.9)
    small = Implicit(budget=10 * problem.p.numel() * 8)
    error, info = gradient_error(problem, torch.float64, 1e-10, adjoint=small)
    assert error <= 1e-8
    assert info.backward.arnoldi is None


def test_solution_does_not_depend_on_grad_mode(layer):
    """The same bits come out with and without a graph."""
    problem = layer("complex", 0.5)
    W, U, b, p = problem.leaves(torch.float32)

    def solve():
        return scrimp.fixed_point(lambda x: torch.tanh(x @ W.T + p @ U.T + b), torch.zeros(p.shape), batch_dims=1)[0]

    with torch.no_grad():
        without = solve()
    assert torch.equal(solve().detach(), without)


def test_batch_dims_zero_solves_the_batch_as_one_problem(layer):
    """A batch taken as one problem has the same solution and gradient."""
    problem = layer("complex", 0.5)
    W, U, b, p = problem.leaves(torch.float64)
    x, info = scrimp.fixed_point(lambda x: torch.tanh(x @ W.T + p @ U.T + b), torch.zeros(p.shape, dtype=p.dtype))
    (found,) = torch.autograd.grad((x * problem.cotangent).sum(), p)
    assert info.converged.shape == ()
    expected = problem.gradient[-p.numel() :].view_as(p)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
