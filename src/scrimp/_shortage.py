"""A moment at which a step does not fit into its budget, and the error that says so."""

from __future__ import annotations

from typing import NamedTuple

from scrimp._budget import format_bytes
from scrimp._optimizers import Coming
from scrimp.errors import BudgetError

_NOTHING = Coming()


class Outlook(NamedTuple):
    """How many bytes a step takes.

    Attributes:
        nbytes: as far as anybody can tell.
        advice: the beginning of a sentence that goes on with other ways out.
        final: nothing more would be learnt from what else the step does.
    """

    nbytes: int
    advice: str
    final: bool = True


def past_this(need: int, coming: Coming = _NOTHING) -> Outlook:
    """Return the outlook where nobody can see beyond the operator that does not fit."""
    nbytes = need + coming.nbytes
    return Outlook(nbytes, f"Give a larger budget ({nbytes} bytes get past this operator{of_it(coming)})")


def of_it(coming: Coming) -> str:
    """Say how much of a number of bytes is for optimizers."""
    return f", {format_bytes(coming.nbytes)} of it for optimizer state to come" if coming.nbytes else ""


class Shortage(NamedTuple):
    """What an operator needs that cannot run.

    Attributes:
        level: bytes in use.
        nbytes: that it makes.
        in_pieces: bytes that are free, but not in a row.
        budget: bytes that the device may hold.
        there: what stands on the device, line by line.
    """

    level: int
    nbytes: int
    in_pieces: int
    budget: int
    there: str

    @property
    def need(self) -> int:
        """Bytes that the device would have to hold."""
        return self.level + self.nbytes + self.in_pieces

    def error(self, outlook: Outlook) -> BudgetError:
        """Return what tells the user."""
        pieces = f", and {format_bytes(self.in_pieces)} in pieces that are too small" if self.in_pieces else ""
        return BudgetError(
            f"need {format_bytes(self.need)} here ({format_bytes(self.nbytes)} more than the "
            f"{format_bytes(self.level)} in use{pieces}), have a budget of {format_bytes(self.budget)}, and nothing is "
            f"left that could be dropped and had again. {outlook.advice}, or make the step smaller: the batch, the "
            f"inputs, a loss in chunks. There are:\n{self.there}",
            smallest=outlook.nbytes,
        )
