"""Which steps are taken towards a solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .checks import need_count, need_positive
from .equation import Equation
from .gmres import LinearSolution
from .iterate import Stepper
from .krylov import Apply
from .linear import anderson_solve
from .newton import NewtonStepper
from .pace import DEEP, DEEP_WIDE, WIDE
from .steppers import AndersonStepper, AutoStepper, BroydenStepper, PicardStepper


class Solver(Protocol):
    """A choice of steps."""

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Plain steps if they are fast, then Anderson's, and where those are stuck Broyden's, then Newton's.

    Holds up to 2 · ``depth`` states, 4 · ``depth`` where Anderson's steps are stuck.

    Attributes:
        depth: How many differences Anderson acceleration may remember on a slow problem. None for 24, or 15 where a
            sample has so many unknowns that remembering more costs as much time as it saves.
    """

    depth: int | None = None

    def __post_init__(self) -> None:
        if self.depth is not None:
            need_count("depth", self.depth, 1)

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""
        depth = self.depth or (DEEP if x0.shape[1] < WIDE else DEEP_WIDE)
        return AutoStepper(equation, x0, depth)


@dataclass(frozen=True, slots=True)
class Picard:
    """Plain iteration x ← x + damping · (f(x) − x); holds no more than the state. Needs a contraction.

    Attributes:
        damping: The share of each step that is taken.
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        need_positive("damping", self.damping)

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""
        return PicardStepper(self.damping)


@dataclass(frozen=True, slots=True)
class Anderson:
    """Anderson acceleration; holds 2 · ``depth`` states. Solves adjoint equations too, as ``Implicit(Anderson())``.

    Attributes:
        depth: How many differences of earlier steps are combined.
        damping: The share of each step's residual that is taken.
        max_products: How many products with the Jacobian the solution of an adjoint equation may take.
    """

    depth: int = 8
    damping: float = 1.0
    max_products: int = 200

    def __post_init__(self) -> None:
        need_count("depth", self.depth, 1)
        need_positive("damping", self.damping)
        need_count("max_products", self.max_products, 1)

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""
        return AndersonStepper(x0, self.depth, self.damping)

    def solve(self, apply: Apply, rhs: Tensor, start: Tensor | None, rtol: float) -> LinearSolution:
        """Solve a linear system to a relative residual of ``rtol`` if possible."""
        return anderson_solve(apply, rhs, start, rtol, self.depth, self.damping, self.max_products)


@dataclass(frozen=True, slots=True)
class Broyden:
    """Broyden's first method; holds 2 · ``depth`` states.

    Attributes:
        depth: How many rank-one corrections of the inverse Jacobian are kept.
    """

    depth: int = 30

    def __post_init__(self) -> None:
        need_count("depth", self.depth, 1)

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""
        return BroydenStepper(x0, self.depth)


@dataclass(frozen=True, slots=True)
class NewtonKrylov:
    """Newton's method with GMRES on difference quotients and a line search; holds ``restart`` states.

    Attributes:
        restart: How many basis vectors GMRES holds.
        max_products: How many evaluations of f the direction of one step may take.
    """

    restart: int = 30
    max_products: int = 90

    def __post_init__(self) -> None:
        need_count("restart", self.restart, 1)
        need_count("max_products", self.max_products, 1)

    def stepper(self, equation: Equation, x0: Tensor) -> Stepper:
        """The steps, for one solve from ``x0``."""
        return NewtonStepper(equation, self.restart, self.max_products)
