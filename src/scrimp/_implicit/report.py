"""Nothing fails silently: what is said when a solution or its gradient may be wrong."""

from __future__ import annotations

import warnings
from typing import Literal

from torch import Tensor

from ..errors import ConvergenceError, ConvergenceWarning, GradientWarning
from .adjoints import Adjoint, Implicit, Reversible, Unroll
from .results import BackwardInfo, Info
from .state import Layout

OnFail = Literal["warn", "raise", "ignore"]
CHOICES = ("warn", "raise", "ignore")


# An estimated error of so many times the tolerance is expected of a well-posed problem ...
EXPECTED = 300.0
# ... but beyond this share of the result it is never fine.
WORST = 0.1


def largest_error(rtol: Tensor) -> Tensor:
    """The estimated relative error up to which nothing is said, for solutions to these tolerances."""
    return (EXPECTED * rtol).clamp_max(WORST)


def report_solution(info: Info, layout: Layout, on_fail: OnFail, max_steps: int) -> None:
    """Say it if a sample did not converge, or may be wrong although it did."""
    if on_fail == "ignore":
        return
    if info.all_converged:
        _report_error(info, layout, on_fail)
        return
    failed = ~info.converged.flatten()
    worst = int((info.residual / info.bound).flatten().nan_to_num(float("inf")).argmax())
    residual, bound = float(info.residual.flatten()[worst]), float(info.bound.flatten()[worst])
    message = (
        f"{_which(failed, layout)} did not converge: need a residual of at most {bound:.1e}, "
        f"have {residual:.1e}; the result and its gradient may be wrong. {_advice(info, residual, max_steps)}"
    )
    _say(message, ConvergenceWarning, on_fail)


def _report_error(info: Info, layout: Layout, on_fail: OnFail) -> None:
    doubtful = (info.state_error > info.expected_error).flatten()
    if not bool(doubtful.any()):
        return
    worst = float(info.state_error.max())
    message = (
        f"{_which(doubtful, layout)} may be far from the solution although the residual is small: the estimated "
        f"relative error is {worst:.1e}; the equation is nearly singular: tighten rtol, or use double precision"
    )
    _say(message, ConvergenceWarning, on_fail, deeper=1)


def report_curvature(is_minimum: Tensor, layout: Layout, on_fail: OnFail) -> None:
    """Say it if a stationary point is not a minimum."""
    if on_fail == "ignore" or bool(is_minimum.all()):
        return
    message = (
        f"{_which(~is_minimum, layout)} reached a point where the loss is stationary but curves down: "
        "need a minimum, have a saddle point or a maximum; start elsewhere"
    )
    _say(message, ConvergenceWarning, on_fail)


def report_random(on_fail: OnFail) -> None:
    """Say that f drew random numbers."""
    message = (
        "f draws random numbers, so that it is another function at each evaluation: need one function, "
        "the result and its gradient may belong to none; draw before, outside f, or switch dropout off"
    )
    if on_fail != "ignore":
        _say(message, ConvergenceWarning, on_fail, deeper=1)


def report_gradient(info: BackwardInfo, sound: Tensor, adjoint: Adjoint, layout: Layout, on_fail: OnFail) -> None:
    """Say it if an adjoint equation was not solved, or not well, or its right-hand side was not ``sound``."""
    failed = ~info.solved.flatten()
    if on_fail == "ignore" or not bool(failed.any()):
        return
    if not bool(sound.all()):
        message = (
            f"the gradient that came in for {_which(~sound, layout)} is not finite, so what goes out is NaN: "
            "look at the loss and at what lies between it and the solution"
        )
        _say(message, GradientWarning, on_fail)
        failed = failed & sound
        if not bool(failed.any()):
            return
    worst = int(info.gradient_error.flatten().nan_to_num(float("inf")).argmax())
    residual, error = float(info.residual.flatten()[worst]), float(info.gradient_error.flatten()[worst])
    match adjoint:
        case Implicit():
            advice = (
                "the problem may be near singular: tighten rtol, use double precision, "
                "give Implicit(GMRES()) more products, or Implicit(Dense()) for few unknowns"
            )
        case Unroll() | Reversible():
            advice = (
                "steps carry a derivative no further than they shrink the distance that they began with: "
                "start further away, tighten rtol, or use adjoint=Implicit()"
            )
        case _:
            advice = "the approximation needs a contraction: use adjoint=Implicit()"
    coupled = "" if not layout.batch_shape else "; if samples depend on each other, pass batch_dims=0"
    message = (
        f"the gradient of {_which(failed, layout)} may be wrong: the adjoint equation has a relative "
        f"residual of {residual:.1e}, the estimated error of the gradient is {error:.1e}; {advice}{coupled}"
    )
    _say(message, GradientWarning, on_fail)


def _advice(info: Info, residual: float, max_steps: int) -> str:
    if residual != residual or residual == float("inf"):
        return "f gave a value that is not finite; look at f and at x0 for that sample"
    ran_out = int(info.steps.max()) >= max_steps
    more = f"raise max_steps (now {max_steps})" if ran_out else "rounding may be in the way: use double precision"
    batch = (
        "if samples depend on each other, pass batch_dims=0"
        if info.converged.dim()
        else "if the first dimensions count independent samples, pass batch_dims"
    )
    return f"Next: {more}, loosen rtol, start nearer, or choose another solver; {batch}"


def _which(failed: Tensor, layout: Layout) -> str:
    if not layout.batch_shape:
        return "the state"
    indices = failed.nonzero().flatten().tolist()
    shown = ", ".join(str(index) for index in indices[:5]) + (", …" if len(indices) > 5 else "")
    return f"{len(indices)} of {layout.samples} samples ({shown})"


def _say(message: str, category: type[Warning], on_fail: OnFail, deeper: int = 0) -> None:
    if on_fail == "raise":
        raise ConvergenceError(message)
    # Through this package's frames to the line of the user's that called it; backward has no such line.
    warnings.warn(message, category, stacklevel=7 + deeper if category is ConvergenceWarning else 2)
