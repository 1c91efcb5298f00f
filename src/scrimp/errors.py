"""The errors that scrimp raises; all of them are :class:`ScrimpError`."""

from __future__ import annotations

__all__ = ["BudgetError", "PlanError", "ScrimpError", "TraceError"]


class ScrimpError(Exception):
    """Base of every error that scrimp raises."""


class TraceError(ScrimpError):
    """A trace contradicts itself, or a file does not hold one."""


class PlanError(ScrimpError):
    """A plan does not fit its trace, or a file does not hold one."""


class BudgetError(ScrimpError):
    """No plan that was found meets the budget, or the budget itself cannot be read.

    Attributes:
        smallest: the smallest budget, in bytes, that a plan is known for; ``None`` where the budget was not a
            size.
    """

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest
