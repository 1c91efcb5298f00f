"""The loop around every solver: freezing, best states, retreats from divergence, bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .equation import Equation, Linearisation
from .tolerance import Tolerance, euclidean

Progress = Callable[[int, Tensor], None]

# An accelerated step may overshoot for a while on a non-normal problem; beyond this it is not coming back.
RETREAT_AT = 10.0


class Stepper(Protocol):
    """What a solver does between two looks at the residual. Masks and norms have one entry a sample."""

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """The next state after ``x`` with residual ``r``, and that state's residual if it is known."""

    def aim(self, bound: Tensor) -> Tensor:
        """The residual norm to stop at: the bound, or less where the residual understates the error."""

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """A better state than a solved ``x`` that costs no evaluation; ``x`` itself if there is none."""

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Hear that these samples diverged and are put back to ``x``: forget their past, be more careful."""

    def given_up(self) -> Tensor | None:
        """The samples for which more steps would not help; None for none."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best state found for every sample, and how it was found. One entry a sample, except the history.

    ``polished`` is a further step from a solved ``x``, not evaluated yet: the evaluation that re-checks
    the solution
    can as well be made there. ``stretch`` is how far the solution is from the start for each unit of residual that the
    start had: an estimate, for nothing, of how much error a residual may stand for.
    """

    x: Tensor
    polished: Tensor
    solved: Tensor
    start_scale: Tensor
    steps: Tensor
    evaluations: Tensor
    history: Tensor
    stretch: Tensor


def iterate(
    equation: Equation,
    x0: Tensor,
    stepper: Stepper,
    tolerance: Tolerance,
    max_steps: int,
    progress: Progress | None,
) -> Solution:
    """Step until every sample is solved, given up or not finite, or ``max_steps`` are done.

    A sample that needs no more steps stays where it is while the others go on.
    """
    x, r = x0, equation.evaluate(x0)
    norm, start_norm = tolerance.norm(r), euclidean(r)
    if norm.shape != x.shape[:1]:
        raise ValueError(
            f"norm must give one number for each row of a matrix: need {tuple(x.shape[:1])}, have {tuple(norm.shape)}"
        )
    start = start_scale(equation, x, r, tolerance)
    best = _Best(x, r, torch.full_like(norm, torch.inf))
    steps = torch.zeros_like(norm, dtype=torch.long)
    evaluations = torch.full_like(steps, equation.counts.evaluations)
    history = [norm]
    for step in range(max_steps + 1):
        bound = tolerance.bound(scale_of(equation, x, r, start, tolerance), start)
        # One look at one number tells whether there is anything to do for single samples.
        growth = float((norm / best.norm).amax()) if norm.numel() else 0.0
        lost = None if growth <= RETREAT_AT else ~(norm <= RETREAT_AT * best.norm) & best.norm.isfinite()
        best.note(x, r, norm, growth)
        if progress is not None:
            progress(step, equation.layout.per_sample(norm))
        still = _still_to_solve(norm, bound, best, stepper)
        if step == max_steps or not bool(still.any()):
            break
        if lost is not None and bool(lost.any()):
            back = lost.unsqueeze(1)
            x, r, norm = (
                torch.where(back, best.x, x),
                torch.where(back, best.r, r),
                best.norm.where(lost, norm),
            )
            stepper.retreat(lost, x, r)
        proposal, known = stepper.step(x, r, norm, bound)
        if bool(still.all()):
            x = proposal
        else:
            x, known = torch.where(still.unsqueeze(1), proposal, x), None
        r = equation.evaluate(x) if known is None else known
        norm = tolerance.norm(r)
        history.append(norm)
        steps += still
        evaluations.masked_fill_(still, equation.counts.evaluations)
    solved = best.norm <= tolerance.bound(scale_of(equation, best.x, best.r, start, tolerance), start)
    stretch = (euclidean(best.x - x0) / start_norm).nan_to_num(0.0, 0.0, 0.0)
    polished = torch.where(solved.unsqueeze(1), stepper.polish(best.x, best.r), best.x)
    return Solution(best.x, polished, solved, start, steps, evaluations, torch.stack(history), stretch)


def start_scale(equation: Equation, x: Tensor, r: Tensor, tolerance: Tolerance) -> Tensor:
    """The size of the numbers that the residual is a difference of, at the start.

    For a fixed point these are x and f(x). A general residual does not show its terms; the Jacobian times the
    state has their size where they depend on the state, the residual itself where they don't.
    """
    if equation.is_fixed_point:
        return torch.maximum(tolerance.norm(x), tolerance.norm(x + r))
    slope = Linearisation(equation, x).transposed(x) if bool(x.any()) else torch.zeros_like(x)
    return torch.maximum(tolerance.norm(r), tolerance.norm(slope))


def scale_of(equation: Equation, x: Tensor, r: Tensor, start: Tensor, tolerance: Tolerance) -> Tensor:
    """What the residual is compared with."""
    return tolerance.norm(x + r) if equation.is_fixed_point else start


def _still_to_solve(norm: Tensor, bound: Tensor, best: _Best, stepper: Stepper) -> Tensor:
    still = ~(norm <= stepper.aim(bound))
    if not best.finite:
        still &= best.norm.isfinite()
    hopeless = stepper.given_up()
    return still if hopeless is None else still & ~hopeless


@dataclass(slots=True)
class _Best:
    """Every sample's state of least residual.

    ``owned`` says whether its tensors may be written to, ``finite`` that every sample had a finite residual.
    """

    x: Tensor
    r: Tensor
    norm: Tensor
    owned: bool = False
    finite: bool = False

    def note(self, x: Tensor, r: Tensor, norm: Tensor, growth: float) -> None:
        """Take in states of which the worst has ``growth`` times its least residual; NaN where that is unknown."""
        if growth <= 1:
            self.x, self.r, self.norm = x, r, norm
            self.owned = False
        elif bool((better := norm < self.norm).any()):
            rows = better.unsqueeze(1)
            into = (self.x, self.r) if self.owned else (torch.empty_like(x), torch.empty_like(r))
            self.x, self.r = torch.where(rows, x, self.x, out=into[0]), torch.where(rows, r, self.r, out=into[1])
            self.owned = True
            self.norm = torch.where(better, norm, self.norm)
        self.finite = self.finite or bool(self.norm.isfinite().all())
