"""Parts of the solvers, where what they give in the end would not show that one of them is broken."""

from __future__ import annotations

import pytest
import torch

import scrimp
from scrimp._implicit.anderson import AndersonHistory
from scrimp._implicit.krylov import Krylov
from scrimp._implicit.problem import FIXED_POINT
from scrimp._implicit.state import layout_of
from scrimp._implicit.steppers import AndersonStepper
from scrimp.solvers import Auto, Picard

DOUBLE = torch.float64


def noted(depth: int, steps: int = 4) -> tuple[AndersonHistory, torch.Tensor, torch.Tensor]:
    """A history of a random linear iteration of three samples, with its last state and residual."""
    generator = torch.Generator().manual_seed(0)
    matrix = 0.2 * torch.randn(6, 6, generator=generator, dtype=DOUBLE)
    x = torch.randn(3, 6, generator=generator, dtype=DOUBLE)
    history = AndersonHistory(x, depth)
    r = x @ matrix + 1 - x
    history.note(x, r)
    for _ in range(steps - 1):
        x = x + r
        r = x @ matrix + 1 - x
        history.note(x, r)
    return history, x, r


def test_combination_leaves_the_least_residual():
    """The combined steps are those that a dense least-squares solve combines."""
    history, x, r = noted(depth=3)
    generator = torch.Generator().manual_seed(0)
    matrix = 0.2 * torch.randn(6, 6, generator=generator, dtype=DOUBLE)
    states = [torch.randn(3, 6, generator=generator, dtype=DOUBLE)]
    for _ in range(3):
        states.append(states[-1] @ matrix + 1)
    residuals = [state @ matrix + 1 - state for state in states]
    d_r = torch.stack(residuals, dim=2).diff(dim=2)
    d_x = torch.stack(states, dim=2).diff(dim=2)
    weights = torch.linalg.lstsq(d_r, r.unsqueeze(2)).solution
    expected = x + r - ((d_x + d_r) @ weights).squeeze(2)
    torch.testing.assert_close(history.combine(x, r, 1.0), expected, rtol=1e-7, atol=1e-9)


def test_a_grown_history_still_knows_its_past():
    """More room changes nothing about the next combination."""
    history, x, r = noted(depth=2)
    before = history.combine(x, r, 1.0)
    history.grow(5)
    torch.testing.assert_close(history.combine(x, r, 1.0), before, rtol=1e-12, atol=0)


def test_a_forgotten_sample_takes_a_plain_step_and_no_other_does():
    """Forgetting the past of one sample leaves it the plain step, and the others their combinations."""
    history, x, r = noted(depth=3)
    before = history.combine(x, r, 1.0)
    history.forget(torch.tensor([True, False, False]), x, r)
    after = history.combine(x, r, 1.0)
    assert torch.equal(after[0], x[0] + r[0])
    assert torch.equal(after[1:], before[1:])


def test_only_every_so_many_steps_are_combined():
    """Between combinations the steps are plain ones, bit by bit."""
    x = torch.linspace(1, 2, 8, dtype=DOUBLE).reshape(2, 4)
    slopes = torch.tensor([0.9, -0.5, 0.3, 0.7], dtype=DOUBLE)
    stepper, plain = AndersonStepper(x, 5, 1.0, every=3), []
    for _ in range(7):
        r = slopes * x + 1 - x
        following, _ = stepper.step(x, r, r.norm(dim=1), torch.zeros(2, dtype=DOUBLE))
        plain.append(torch.equal(following, x + r))
        x = following
    assert plain == [True, True, True, False, True, True, False]


@pytest.mark.parametrize("how", ["growing", "retreat"])
def test_every_step_is_combined_where_plain_ones_do_not_contract(how):
    """A residual that grew under a plain step, or a retreat, ends the taking of plain steps."""
    x = torch.ones(1, 3, dtype=DOUBLE)
    slopes = torch.tensor([-1.5, 0.5, 0.2], dtype=DOUBLE)
    stepper, plain = AndersonStepper(x, 5, 1.0, every=3), []
    for step in range(5):
        r = slopes * x + 1 - x
        if step == 1 and how == "retreat":
            stepper.retreat(torch.tensor([False]), x, r)
        norm = r.norm(dim=1) if how == "growing" else torch.full((1,), 1.0 / (1 + step), dtype=DOUBLE)
        following, _ = stepper.step(x, r, norm, torch.zeros(1, dtype=DOUBLE))
        plain.append(torch.equal(following, x + r))
        x = following
    assert plain[0]
    assert not any(plain[2:])


def test_a_space_that_ends_adds_nothing_more():
    """Where A is a multiple of one for a sample, its space ends at once and the other's goes on."""
    generator = torch.Generator().manual_seed(0)
    general = torch.randn(5, 5, generator=generator, dtype=DOUBLE)
    matrices = torch.stack([3 * torch.eye(5, dtype=DOUBLE), general])
    first = torch.randn(2, 5, generator=generator, dtype=DOUBLE)
    krylov = Krylov(first, 4)
    for _ in range(4):
        krylov.extend((matrices @ krylov.last().unsqueeze(2)).squeeze(2))
    expected = torch.zeros(5, 4, dtype=DOUBLE)
    expected[0, 0] = 3
    torch.testing.assert_close(krylov.matrix[0, :5, :4], expected, rtol=1e-14, atol=1e-14)
    basis = krylov.blocks[0][1, :5]
    torch.testing.assert_close(basis @ basis.T, torch.eye(5, dtype=DOUBLE), rtol=0, atol=1e-12)
    torch.testing.assert_close(general @ basis[:4].T, basis.T @ krylov.matrix[1, :5, :4], rtol=0, atol=1e-12)


def test_a_basis_stays_orthogonal_where_images_are_nearly_in_it():
    """Vectors that lose nearly all of their length to the basis are orthogonalised again."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(30, 30, generator=generator)).Q
    matrix = left @ torch.diag(torch.logspace(0, -5, 30)) @ left.T
    krylov = Krylov(torch.randn(1, 30, generator=generator), 7)
    for _ in range(7):
        krylov.extend(krylov.last() @ matrix)
    basis = krylov.blocks[0][0, :8]
    torch.testing.assert_close(basis @ basis.T, torch.eye(8), rtol=0, atol=2e-6)


def test_solved_samples_stand_still():
    """A sample that is solved early has the bits that it has alone, however long the others take."""
    slopes, options = torch.tensor([0.1, 0.95], dtype=DOUBLE), {"batch_dims": 1, "solver": Picard(), "max_steps": 900}
    x, info = scrimp.fixed_point(lambda x: slopes * x + 1, torch.zeros(2, dtype=DOUBLE), **options)
    alone, _ = scrimp.fixed_point(lambda x: slopes[:1] * x + 1, torch.zeros(1, dtype=DOUBLE), **options)
    assert int(info.steps[0]) < int(info.steps[1])
    assert torch.equal(x[:1], alone)


@pytest.mark.parametrize(("unknowns", "leaves_some_out"), [(300, True), (30, False)])
def test_auto_leaves_out_combinations_on_wide_states_only(unknowns, leaves_some_out):
    """Where a combination costs as much as f, not every step is combined once Anderson's method runs."""
    slopes = torch.linspace(-0.9, 0.9, unknowns, dtype=DOUBLE)
    x = torch.zeros(1, unknowns, dtype=DOUBLE)
    equation = FIXED_POINT.equation(lambda x: slopes * x + 1, layout_of(x, 1))
    stepper, plain = Auto().stepper(equation, x), []
    for _ in range(25):
        r = equation.evaluate(x)
        following, _ = stepper.step(x, r, r.norm(dim=1), torch.full((1,), 1e-10, dtype=DOUBLE))
        plain.append(torch.equal(following, x + r))
        x = following
    accelerated = plain[plain.index(False) :]
    assert any(accelerated) == leaves_some_out
