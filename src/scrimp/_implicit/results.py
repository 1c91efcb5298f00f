"""What solving an equation has found out, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class BackwardInfo:
    """How one adjoint equation was solved. Tensors have one entry a sample, shaped like the batch.

    Attributes:
        solved: Whether the solution is as good as was asked for.
        vjps: Products with the transposed Jacobian, the one that re-checks the solution included.
        jvps: Products with the Jacobian itself; only derivatives of second order need them.
        residual: Relative residual of the true adjoint equation, computed afresh from its solution.
        gradient_error: Estimated relative error of the gradient with respect to the equation.
    """

    solved: Tensor
    vjps: int
    jvps: int
    residual: Tensor
    gradient_error: Tensor
    arnoldi: Tensor | None = None

    @property
    def spectral_radius(self) -> Tensor | None:
        """Arnoldi's estimate of f's Jacobian's spectral radius; None if GMRES did not run."""
        if self.arnoldi is None:
            return None
        # On the CPU: not every build of torch has eigenvalues of general matrices elsewhere.
        largest: Tensor = (1 - torch.linalg.eigvals(self.arnoldi.cpu())).abs().amax(1)
        return largest.reshape(self.solved.shape).to(self.solved.device)


@dataclass(frozen=True, slots=True)
class Info:
    """How an equation was solved. Tensors have one entry a sample, shaped like the batch.

    Attributes:
        converged: Whether the residual is within its bound.
        steps: Steps of the solver until the sample was solved.
        evaluations: Evaluations of f until the sample was solved.
        total_evaluations: All evaluations of f in forward, the last one, which re-checks the
        solution, included.
        residual: Norm of the true residual, computed afresh at the solution.
        bound: What the residual may be: atol + rtol · scale.
        state_error: Estimated relative error of the solution, from how far it is from the start: a residual within its
            bound can stand for a large error where the equation is nearly singular.
        expected_error: How large estimated errors may be at this tolerance before they are warned about.
        rtol: The relative tolerance in force; larger than asked for where the dtype cannot do better.
        history: Residual norms step by step, of shape (steps + 1, *batch).
        backward_log: One entry for each adjoint equation solved so far, the newest last.
    """

    converged: Tensor
    steps: Tensor
    evaluations: Tensor
    total_evaluations: int
    residual: Tensor
    bound: Tensor
    state_error: Tensor
    expected_error: Tensor
    rtol: float
    history: Tensor
    backward_log: list[BackwardInfo] = field(default_factory=list)

    @property
    def backward(self) -> BackwardInfo | None:
        """The newest entry of ``backward_log``; None before backward."""
        return self.backward_log[-1] if self.backward_log else None

    @property
    def all_converged(self) -> bool:
        """Whether every sample converged."""
        return bool(self.converged.all())

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw each sample's residual over the steps, with its bound; needs matplotlib."""
        from .plot import plot_residuals

        return plot_residuals(self, axes)


class WarmStart:
    """Where the last call ended, forward and backward, as the place where the next one starts.

    Give the same object to call after call on slowly changing problems, such as the steps of a training
    loop on
    one batch or of a simulation. It changes how much work is done, never what is solved.

    Attributes:
        state: The last solution, flat; None before the first call.
        adjoint: The last solution of the adjoint equation, flat; None before the first backward.
    """

    __slots__ = ("adjoint", "state")

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.adjoint: Tensor | None = None

    def start(self, fallback: Tensor) -> Tensor:
        """The remembered state if it fits, else ``fallback``."""
        state = _fitting(self.state, fallback)
        return fallback if state is None else state

    def adjoint_start(self, like: Tensor) -> Tensor | None:
        """The remembered adjoint if it fits."""
        return _fitting(self.adjoint, like)


def _fitting(remembered: Tensor | None, like: Tensor) -> Tensor | None:
    if remembered is None or remembered.shape != like.shape:
        return None
    same = remembered.dtype == like.dtype and remembered.device == like.device
    return remembered if same and bool(remembered.isfinite().all()) else None
