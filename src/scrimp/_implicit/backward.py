"""The adjoint equation: solved, checked and reported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .adjoints import Implicit, JacobianFree, Phantom, Reversible, Unroll
from .equation import Equation, Linearisation, no_autocast
from .gmres import LinearSolution, relative_norm
from .report import EXPECTED, WORST, OnFail, report_gradient
from .results import BackwardInfo, Info, WarmStart
from .state import Layout
from .tolerance import START_SHARE, euclidean, power_of_two

# A linear solver that stops this near its goal was stopped by rounding.
NEARLY = 10.0
# In half precision a solution is only as near as its dtype allows; its adjoint, solved in single, can be
# nearer.
HALF_EPS, HALF_SHARE = 1e-5, 0.1


@dataclass(frozen=True, slots=True)
class AdjointSolve:
    """Solves A·v = g or Aᵀ·v = g, where A is minus the residual's Jacobian at the solution.

    Attributes:
        equation: What was solved.
        at: The Jacobian at the solution.
        adjoint: Which method, how exactly.
        rtol: Relative residual to reach.
        forward_error: Relative to the state, the residual that forward left.
        state_error: Estimated relative error of the solution.
        expected_error: What errors may be expected, given the tolerance of the solution.
        on_fail: What to do about a gradient that may be wrong.
        log: Where to note how it went.
        warm: Where to start from and leave the result; None for zero.
    """

    equation: Equation
    at: Linearisation
    adjoint: Implicit | Phantom | JacobianFree
    rtol: float
    forward_error: Tensor
    state_error: Tensor
    expected_error: Tensor
    on_fail: OnFail
    log: list[BackwardInfo]
    warm: WarmStart | None

    def __call__(self, rhs: Tensor, transposed: bool) -> Tensor:
        """The solution; says so if it is not a good one."""
        with torch.no_grad(), no_autocast(rhs.device):
            product = self.at.transposed if transposed else self.at.forward
            start = self.warm.adjoint_start(rhs) if self.warm is not None and transposed else None
            sound = rhs.isfinite().all(1)
            clean = rhs if bool(sound.all()) else torch.where(sound.unsqueeze(1), rhs, 0)
            # Squares of tiny or huge gradients would vanish or overflow; the system is linear, so it can be scaled.
            unit = power_of_two(clean) if clean.shape[1] else 1.0
            start = None if start is None else start / unit
            clean = clean / unit
            found = self.adjoint.solver_for(rhs).solve(product, clean, start, self.rtol)
            x = found.x * unit
            if self.warm is not None and transposed:
                self.warm.adjoint = x
            # A gradient that came in as NaN must not go out as a number.
            x = x if bool(sound.all()) else torch.where(sound.unsqueeze(1), x, torch.nan)
            info = self._judge(found, clean, sound, transposed)
        self.log.append(info)
        report_gradient(info, sound, self.adjoint, self.equation.layout, self.on_fail)
        return x

    def _judge(self, found: LinearSolution, rhs: Tensor, sound: Tensor, transposed: bool) -> BackwardInfo:
        length, size = euclidean(rhs), euclidean(found.x)
        error = found.amplification * found.residual * length / size.clamp_min(torch.finfo(size.dtype).tiny)
        # The state's own error moves the point of linearisation by as much.
        error = torch.maximum(error, found.amplification * self.forward_error)
        error = torch.maximum(error, self.state_error)
        limit = self.expected_error.clamp_min(EXPECTED * self.rtol).clamp_max(WORST)
        if isinstance(self.adjoint, Implicit):
            solved = (found.residual <= NEARLY * self.rtol) & (error <= limit)
        else:
            solved = found.residual < 1
        # Where no gradient comes in none goes out, however bad the sample.
        nothing = length == 0
        solved, error = solved | nothing, torch.where(nothing, 0.0, error)
        shaped = self.equation.layout.per_sample
        return BackwardInfo(
            solved=shaped(solved & sound),
            vjps=found.products if transposed else 0,
            jvps=0 if transposed else found.products,
            residual=shaped(found.residual),
            gradient_error=shaped(error),
            arnoldi=found.hessenberg if self.equation.is_fixed_point else None,
        )


def judge_steps(
    length: Tensor, left: Tensor, steps: int, info: Info, adjoint: Unroll | Reversible, layout: Layout, on_fail: OnFail
) -> None:
    """Note and report what steps did not carry of a gradient: as a series, they solve the adjoint equation in part."""
    with torch.no_grad(), no_autocast(length.device):
        relative = relative_norm(left, length)
        # After k steps what is left is the k-th power of what one more would shrink it by.
        rate = relative.double() ** (1 / steps) if steps else torch.ones_like(relative).double()
        error = torch.where(rate < 1, relative / (1 - rate), torch.inf)
        error = torch.where(relative == 0, 0.0, error)
        sound = length.isfinite()
        shaped = layout.per_sample
        solved = shaped(sound & (error <= info.expected_error.flatten()))
        judged = BackwardInfo(solved, steps, 0, shaped(relative), shaped(error))
    info.backward_log.append(judged)
    report_gradient(judged, sound, adjoint, layout, on_fail)


def relative_error(equation: Equation, x: Tensor, residual: Tensor, start_scale: Tensor) -> Tensor:
    """The residual relative to the state, with the start standing in for a state that vanished.

    A residual that is zero has still been rounded, so that nothing less than the dtype's eps is believed.
    """
    limits = torch.finfo(x.dtype)
    size = torch.maximum(euclidean(x), START_SHARE * start_scale) if equation.is_fixed_point else euclidean(x)
    return (euclidean(residual) / size.clamp_min(limits.tiny)).clamp_min(limits.eps)


def adjoint_rtol(adjoint: Implicit | Phantom | JacobianFree, rtol: float, eps: float) -> float:
    """The tolerance of the adjoint equation: the solution's, but no coarser than half precision computes."""
    if isinstance(adjoint, Implicit) and adjoint.rtol is not None:
        return adjoint.rtol
    return min(rtol, HALF_SHARE * eps) if eps > HALF_EPS else rtol
