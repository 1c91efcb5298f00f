"""Warnings about functions that draw, and whose line warnings name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import scrimp
from scrimp.adjoints import Reversible, Unroll
from scrimp.errors import ConvergenceWarning
from scrimp.solvers import Picard

DOUBLE = torch.float64


def test_random_function_warns():
    """A function that is not deterministic does not pass for solved."""
    with pytest.warns(ConvergenceWarning):
        scrimp.fixed_point(lambda x: 0.5 * x + torch.randn_like(x), torch.ones(50), max_steps=10)


@pytest.mark.parametrize(
    "options", [{}, {"adjoint": Unroll(), "solver": Picard()}, {"adjoint": Reversible(0.3), "rtol": 1e-3}]
)
def test_function_that_draws_warns_even_where_it_converges(options):
    """Dropout that by chance drops nothing lets a small state converge, and is warned about all the same."""
    one = torch.ones((), dtype=DOUBLE)
    with pytest.warns(ConvergenceWarning, match="draws random numbers"):
        _, info = scrimp.fixed_point(lambda x: 1 + 0.1 * nn.functional.dropout(x, 1e-9), one, **options)
    assert info.all_converged


def test_warning_about_draws_points_at_the_caller():
    """The warning about random numbers names the file that asked for the solution."""
    with pytest.warns(ConvergenceWarning, match="draws random numbers") as caught:
        scrimp.fixed_point(lambda x: 1 + 0.1 * nn.functional.dropout(x, 1e-9), torch.ones(()))
    assert caught[0].filename == __file__


def test_drawing_outside_the_function_is_silent():
    """A mask drawn before, and a progress callback that draws, are no reason to warn."""
    mask = torch.rand(4) < 0.5
    scrimp.fixed_point(lambda x: 0.5 * x * mask + 1, torch.ones(4), progress=lambda step, norms: torch.rand(1))


def test_impossible_tolerance_is_named():
    """A tolerance below rounding is raised to what is possible, and that is said."""
    with pytest.warns(ConvergenceWarning, match="rtol must be at least"):
        _, info = scrimp.fixed_point(lambda x: torch.cos(x), torch.ones(()), rtol=1e-12)
    assert info.rtol > 1e-12


def test_warning_points_at_the_caller():
    """The warning about a solution names the file that asked for it."""
    with pytest.warns(ConvergenceWarning) as caught:
        scrimp.fixed_point(lambda x: x + 1, torch.zeros(2))
    assert caught[0].filename == __file__
