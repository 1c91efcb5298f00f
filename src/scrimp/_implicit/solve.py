"""From an equation to a solution with a derivative and a record of how it was found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .adjoints import Implicit, JacobianFree, Phantom
from .attach import attach
from .backward import AdjointSolve, adjoint_rtol, relative_error
from .curvature import is_minimum
from .draws import drawing_reported
from .equation import Equation, Linearisation, no_autocast
from .iterate import Solution, iterate, scale_of, start_scale
from .problem import computing_eps
from .report import largest_error, report_curvature, report_solution
from .results import Info
from .settings import Settings
from .solvers import Solver
from .state import Tree
from .tolerance import START_SHARE, Tolerance, euclidean


def find(equation: Equation, x0: Tree, solver: Solver, tolerance: Tolerance, settings: Settings) -> Solution:
    """Run a solver from x0, without a graph."""
    with torch.no_grad(), no_autocast(equation.layout.device):
        start = equation.layout.flat(x0, "x0").detach()
        if settings.warm is not None:
            start = settings.warm.start(start)
        stepper = solver.stepper(equation, start)
        # What a progress callback draws is its own affair.
        silent = settings.progress is not None
        with nullcontext() if silent else drawing_reported(equation.layout.device, settings.on_fail):
            return iterate(equation, start, stepper, tolerance, settings.max_steps, settings.progress)


def given(equation: Equation, x: Tensor, tolerance: Tolerance) -> Solution:
    """A solution that somebody else found."""
    with torch.no_grad(), no_autocast(equation.layout.device):
        r = equation.evaluate(x)
        norm = tolerance.norm(r)
        none = torch.zeros_like(norm, dtype=torch.long)
        scale = start_scale(equation, x, r, tolerance)
        return Solution(x, x, torch.zeros_like(norm, dtype=torch.bool), scale, none, none, norm.unsqueeze(0), norm * 0)


def differentiable(equation: Equation, found: Solution, tolerance: Tolerance, settings: Settings) -> tuple[Tree, Info]:
    """The user's state at a solution: re-checked, reported on, and attached to all that it depends on."""
    x, at, info = conclude(equation, found, tolerance, settings)
    if at is None or not at.depends_on_others():
        return equation.layout.tree(x), info
    solve = adjoint_solve(equation, at, x, found.start_scale, info, tolerance, settings)
    return equation.layout.tree(attach(equation, at, x, solve, settings.order)), info


def conclude(
    equation: Equation, found: Solution, tolerance: Tolerance, settings: Settings
) -> tuple[Tensor, Linearisation | None, Info]:
    """Re-check a solution where the user will see it, and report what is wrong with it."""
    x, at, info = _checked(equation, found, found.polished, tolerance)
    if bool((found.solved & ~info.converged.flatten()).any()):
        x, at, info = _checked(equation, found, found.x, tolerance)
    if settings.warm is not None:
        settings.warm.state = x
    report_solution(info, equation.layout, settings.on_fail, settings.max_steps)
    if equation.symmetric:
        upward = is_minimum(at or Linearisation(equation, x), x)
        report_curvature(upward, equation.layout, settings.on_fail)
    return x, at, info


def adjoint_solve(
    equation: Equation,
    at: Linearisation,
    x: Tensor,
    start_scale: Tensor,
    info: Info,
    tolerance: Tolerance,
    settings: Settings,
) -> AdjointSolve:
    """The adjoint equation at a solution, ready for its right-hand sides."""
    adjoint = settings.adjoint
    assert isinstance(adjoint, Implicit | Phantom | JacobianFree)
    return AdjointSolve(
        equation=equation,
        at=at,
        adjoint=adjoint,
        rtol=adjoint_rtol(adjoint, tolerance.rtol, computing_eps(equation.layout)),
        forward_error=relative_error(equation, x, at.residual.detach(), start_scale),
        state_error=_for_each(info.state_error, len(x), torch.amax),
        expected_error=_for_each(info.expected_error, len(x), torch.amin),
        on_fail=settings.on_fail,
        log=info.backward_log,
        warm=settings.warm,
    )


def _for_each(values: Tensor, rows: int, worst: Callable[[Tensor], Tensor]) -> Tensor:
    """A value for each row; the worst for all where a transform made other rows of the samples that were solved."""
    if values.numel() == rows or not values.numel():
        return values.flatten()
    return worst(values).expand(rows)


def _checked(
    equation: Equation, found: Solution, x: Tensor, tolerance: Tolerance
) -> tuple[Tensor, Linearisation | None, Info]:
    """Evaluate the equation at a state as the user will see it: rounded to the state's dtypes."""
    layout = equation.layout
    x = layout.flat(layout.tree(x)).detach()
    at = Linearisation(equation, x) if torch.is_grad_enabled() else None
    residual = equation.evaluate(x) if at is None else at.residual.detach()
    return x, at, record(equation, found, x, residual, tolerance)


def record(equation: Equation, found: Solution, x: Tensor, residual: Tensor, tolerance: Tolerance) -> Info:
    """The record of a solve, with the residual at the state that is given back."""
    shaped = equation.layout.per_sample
    with torch.no_grad(), no_autocast(x.device):
        norm = tolerance.norm(residual)
        scale = scale_of(equation, x, residual, found.start_scale, tolerance)
        bound = tolerance.bound(scale, found.start_scale)
        # What was lost to rounding does not show in the residual.
        least = torch.finfo(x.dtype).eps * scale_of(
            equation, x, residual, found.start_scale, Tolerance(0, 0, euclidean)
        )
        moved = found.stretch * found.history[0]
        size = torch.maximum(euclidean(x), START_SHARE * moved).clamp_min(torch.finfo(x.dtype).tiny)
        error = found.stretch * torch.maximum(euclidean(residual), least) / size
    history = found.history
    return Info(
        converged=shaped(norm <= bound),
        steps=shaped(found.steps),
        evaluations=shaped(found.evaluations),
        total_evaluations=equation.counts.evaluations,
        residual=shaped(norm),
        bound=shaped(bound),
        state_error=shaped(error),
        expected_error=shaped(largest_error((bound / scale).nan_to_num(torch.inf))),
        rtol=tolerance.rtol,
        history=history.reshape(len(history), *equation.layout.batch_shape),
    )
