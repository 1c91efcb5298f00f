"""How the derivative of a solution is found."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .._budget import parse_budget
from .checks import need_count, need_positive
from .linear import GMRES, BiCGSTAB, LinearSolver, Neumann


@dataclass(frozen=True, slots=True)
class Implicit:
    """By the implicit function theorem: one linear system in the transposed Jacobian, solved matrix-free.

    Attributes:
        linear: What solves the system.
        rtol: Relative residual to solve it to; None for the tolerance of the solution itself.
        budget: Bytes that the solver of the system may hold, as a number or such as "2GiB". Where GMRES would need
            more, BiCGSTAB takes its place.
    """

    linear: LinearSolver = field(default_factory=GMRES)
    rtol: float | None = None
    budget: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.linear, type) or not hasattr(self.linear, "solve"):
            raise TypeError(
                "Implicit needs a solver of linear systems: GMRES(), BiCGSTAB(), Anderson(), Dense() or Neumann(terms) "
                f"from scrimp.solvers; have {self.linear!r}"
            )
        if self.rtol is not None:
            need_positive("rtol", self.rtol)
        if self.budget is not None:
            parse_budget(self.budget)

    def solver_for(self, rhs: Tensor) -> LinearSolver:
        """The linear solver for systems of the size of ``rhs``."""
        if self.budget is None or not isinstance(self.linear, GMRES):
            return self.linear
        basis = (min(self.linear.restart, rhs.shape[1]) + 1) * rhs.numel() * rhs.element_size()
        return self.linear if basis <= parse_budget(self.budget) else BiCGSTAB(self.linear.max_products)


@dataclass(frozen=True, slots=True)
class Phantom:
    """Approximate: what ``steps`` damped steps from the solution would give if they were unrolled.

    Attributes:
        steps: How many steps; each costs one product with the Jacobian, and no memory.
        damping: The share of each step that is taken.
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        need_count("steps", self.steps, 1)
        need_positive("damping", self.damping)

    def solver_for(self, rhs: Tensor) -> LinearSolver:
        """The truncated, damped series."""
        return Neumann(self.steps, self.damping)


@dataclass(frozen=True, slots=True)
class JacobianFree:
    """Approximate: one step from the solution, the Jacobian taken for zero."""

    def solver_for(self, rhs: Tensor) -> LinearSolver:
        """The series' first term."""
        return Neumann(1)


@dataclass(frozen=True, slots=True)
class Unroll:
    """Through the steps of a plain iteration, as if they were layers; only with ``Picard``.

    Attributes:
        checkpoint: Hold one state a step and compute the step again in backward.
    """

    checkpoint: bool = True


@dataclass(frozen=True, slots=True)
class Reversible:
    """Through the steps of a reversible iteration, whose states backward reconstructs: two states held.

    Each reconstructed step loses a factor of (1 − coupling)² in precision, so it is refused where
    (1 − coupling)^(−2 · steps) · eps exceeds 1e-3. What f depends on must be given as arguments.

    Attributes:
        coupling: The share of f's result in each half step, between 0 and 1.
    """

    coupling: float = 0.5

    def __post_init__(self) -> None:
        need_positive("coupling", self.coupling, below=1)


Adjoint = Implicit | Phantom | JacobianFree | Unroll | Reversible
