"""Options: what is refused, and what is said about failures."""

from __future__ import annotations

import pytest
import torch

import scrimp
from scrimp.adjoints import Implicit, Phantom, Reversible
from scrimp.errors import BudgetError, ConvergenceError
from scrimp.solvers import GMRES, Anderson, Auto, BiCGSTAB, Broyden, Neumann, NewtonKrylov, Picard

DOUBLE = torch.float64


def test_on_fail_raise():
    """Failures raise where that was asked for, forward and backward."""
    with pytest.raises(ConvergenceError, match="did not converge"):
        scrimp.fixed_point(lambda x: x + 1, torch.zeros(2), on_fail="raise")
    c = torch.ones(30, dtype=DOUBLE, requires_grad=True)
    slopes = torch.linspace(-0.9, 0.9, 30, dtype=DOUBLE)
    short = Implicit(GMRES(max_products=4))
    x, _ = scrimp.fixed_point(lambda x: slopes * x + c, torch.zeros_like(c), adjoint=short, on_fail="raise")
    with pytest.raises(ConvergenceError, match="gradient"):
        x.square().sum().backward()


def test_on_fail_ignore_is_silent():
    """Failures are only recorded where that was asked for."""
    _, info = scrimp.fixed_point(lambda x: x + 1, torch.zeros(2), on_fail="ignore")
    assert not info.all_converged


def test_unknown_keyword_is_an_error():
    """Misspelled options do not pass."""
    with pytest.raises(TypeError, match="tolerance"):
        scrimp.fixed_point(lambda x: x, torch.zeros(2), tolerance=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "anderson"}, "solver"),
        ({"solver": GMRES()}, "solver"),
        ({"solver": Picard}, "solver"),
        ({"adjoint": "implicit"}, "adjoint"),
        ({"adjoint": GMRES()}, "adjoint"),
    ],
)
def test_options_of_the_wrong_type_are_errors(options, message):
    """What is no solver and no adjoint is refused, with what to write."""
    with pytest.raises(TypeError, match=f"{message} must be one of"):
        scrimp.fixed_point(lambda x: 0.5 * x, torch.zeros(2), **options)


@pytest.mark.parametrize("linear", [Picard(), GMRES, "gmres"])
def test_implicit_needs_a_linear_solver(linear):
    """What solves no linear systems is refused, with what does."""
    with pytest.raises(TypeError, match="solver of linear systems"):
        Implicit(linear)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Auto, {"depth": 0}, "depth must be at least 1"),
        (Anderson, {"depth": 0}, "depth must be at least 1"),
        (Anderson, {"max_products": 0}, "max_products must be at least 1"),
        (Broyden, {"depth": -1}, "depth must be at least 1"),
        (NewtonKrylov, {"restart": 0}, "restart must be at least 1"),
        (Picard, {"damping": 0.0}, "damping must be more than 0"),
        (GMRES, {"restart": 0}, "restart must be at least 1"),
        (BiCGSTAB, {"max_products": 0}, "max_products must be at least 1"),
        (Neumann, {"terms": 0}, "terms must be at least 1"),
        (Phantom, {"steps": 0}, "steps must be at least 1"),
        (Reversible, {"coupling": 1.0}, "coupling must be more than 0 and less than 1"),
        (Reversible, {"coupling": -0.5}, "coupling must be more than 0 and less than 1"),
        (Implicit, {"rtol": 0.0}, "rtol must be more than 0"),
    ],
)
def test_senseless_choices_are_errors(kind, options, message):
    """Solvers and adjoints with numbers that mean nothing are refused where they are made."""
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_adjoint_budget_is_read_like_any_other():
    """Bytes may be written with their unit, and what cannot be read is refused."""
    Implicit(budget="2GiB")
    with pytest.raises(BudgetError):
        Implicit(budget="plenty")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1.5}, "order.* whole number"),
        ({"max_steps": "9"}, "max_steps must be a whole number"),
        ({"batch_dims": True}, "batch_dims must be a whole number"),
        ({"rtol": "1e-3"}, "rtol must be a number"),
        ({"norm": "l2"}, "norm must give"),
        ({"warm": True}, "warm must be"),
    ],
)
def test_numbers_of_the_wrong_type_are_errors(options, message):
    """Options of a type that means nothing are refused before anything runs."""
    with pytest.raises(TypeError, match=message):
        scrimp.fixed_point(lambda x: 0.5 * x, torch.zeros(2), **options)


def test_norm_of_the_wrong_shape_is_an_error():
    """A norm must look at each sample for itself."""
    with pytest.raises(ValueError, match=r"need \(2,\), have \(\)"):
        scrimp.fixed_point(lambda x: 0.5 * x, torch.zeros(2, 3), batch_dims=1, norm=torch.linalg.vector_norm)


@pytest.mark.parametrize("grad", [True, False])
def test_function_that_writes_into_its_argument_is_an_error(grad):
    """Where f changes the state in place the residual would always be zero: that is said."""
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="must not write"):
        scrimp.fixed_point(lambda x: x.mul_(0.5).add_(1), torch.zeros(3))


def test_function_that_writes_in_inference_mode_is_solved():
    """In inference mode, where writes are not counted, f gets a copy."""
    with torch.inference_mode():
        x, info = scrimp.fixed_point(lambda x: x.mul_(0.5).add_(1), torch.zeros(3, dtype=DOUBLE))
    assert info.all_converged
    torch.testing.assert_close(x.clone(), torch.full((3,), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_fail": "shout"}, "on_fail"),
        ({"order": 0}, "order"),
        ({"rtol": -1.0}, "rtol"),
        ({"rtol": float("nan")}, "rtol"),
        ({"max_steps": -1}, "max_steps"),
        ({"batch_dims": 2}, "batch"),
    ],
)
def test_senseless_options_are_errors(options, message):
    """Options without a meaning are refused before anything runs."""
    with pytest.raises(ValueError, match=message):
        scrimp.fixed_point(lambda x: 0.5 * x, torch.zeros(2), **options)


def test_wrong_shapes_are_named():
    """A function whose result is not like the state is refused with both shapes."""
    with pytest.raises(ValueError, match=r"need \(2,\), have \(3,\)"):
        scrimp.fixed_point(lambda x: torch.zeros(3), torch.zeros(2))
    with pytest.raises(TypeError, match="built like the state"):
        scrimp.fixed_point(lambda x: (x, x), torch.zeros(2))
    with pytest.raises(TypeError, match="built like the state"):
        scrimp.fixed_point(lambda x: x[0], (torch.zeros(2),))
    with pytest.raises(TypeError, match="floating-point"):
        scrimp.fixed_point(lambda x: x, torch.zeros(2, dtype=torch.long))
