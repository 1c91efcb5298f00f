"""The adjoint equation: solved, checked and reported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .adjoints import Implicit, JacobianFree, Phantom
from .equation import Equation, Linearisation, no_autocast
from .linear import LinearSolution
from .report import OnFail, report_gradient
from .results import BackwardInfo, WarmStart
from .tolerance import START_SHARE, euclidean, floor_rtol

# An estimated gradient error of so many times the tolerance is expected of a well-posed problem ...
EXPECTED = 300.0
# ... but beyond this share of the gradient it is never fine.
WORST = 0.1
# A linear solver that stops this near its goal was stopped by rounding.
NEARLY = 10.0


@dataclass(frozen=True, slots=True)
class AdjointSolve:
    """Solves A·v = g or Aᵀ·v = g, where A is minus the residual's Jacobian at the solution.

    Attributes:
        equation: What was solved.
        at: The Jacobian at the solution.
        adjoint: Which method, how exactly.
        rtol: Relative residual to reach.
        forward_error: Relative to the state, the residual that forward left.
        on_fail: What to do about a gradient that may be wrong.
        log: Where to note how it went.
        warm: Where to start from and leave the result; None for zero.
    """

    equation: Equation
    at: Linearisation
    adjoint: Implicit | Phantom | JacobianFree
    rtol: float
    forward_error: Tensor
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
            found = self.adjoint.solver_for(rhs).solve(lambda v: -product(v), clean, start, self.rtol)
            # A gradient that came in as NaN must not go out as a number.
            x = found.x if clean is rhs else torch.where(sound.unsqueeze(1), found.x, torch.nan)
            if self.warm is not None and transposed:
                self.warm.adjoint = found.x
            info = self._judge(found, clean, sound, transposed)
        self.log.append(info)
        report_gradient(info, self.adjoint, self.equation.layout, self.on_fail)
        return x

    def _judge(self, found: LinearSolution, rhs: Tensor, sound: Tensor, transposed: bool) -> BackwardInfo:
        length, size = euclidean(rhs), euclidean(found.x)
        error = found.amplification * found.residual * length / size.clamp_min(torch.finfo(size.dtype).tiny)
        error = torch.where(length > 0, error, 0.0)
        # The state's own error moves the point of linearisation by as much.
        error = torch.maximum(error, found.amplification * self.forward_error)
        if isinstance(self.adjoint, Implicit):
            solved = (found.residual <= NEARLY * self.rtol) & (error <= min(EXPECTED * self.rtol, WORST))
        else:
            solved = found.residual < 1
        shaped = self.equation.layout.per_sample
        return BackwardInfo(
            solved=shaped(solved & sound),
            vjps=found.products if transposed else 0,
            jvps=0 if transposed else found.products,
            residual=shaped(found.residual),
            gradient_error=shaped(error),
            arnoldi=found.hessenberg if self.equation.is_fixed_point else None,
        )


def relative_error(equation: Equation, x: Tensor, residual: Tensor, start_scale: Tensor) -> Tensor:
    """The residual relative to the state, with the start standing in for a state that vanished."""
    size = torch.maximum(euclidean(x), START_SHARE * start_scale) if equation.is_fixed_point else euclidean(x)
    return euclidean(residual) / size.clamp_min(torch.finfo(x.dtype).tiny)


def adjoint_rtol(adjoint: Implicit | Phantom | JacobianFree, rtol: float, dtype: torch.dtype) -> float:
    """The tolerance of the adjoint equation, which is solved in the solver's dtype."""
    wanted = adjoint.rtol if isinstance(adjoint, Implicit) and adjoint.rtol is not None else rtol
    return max(wanted, floor_rtol(torch.finfo(dtype).eps))
