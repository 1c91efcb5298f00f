"""What a session with a budget knows of its steps, and which step is in progress in each thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from scrimp._plan import Plan
from scrimp._planned import Planned
from scrimp._report import Measured
from scrimp._steps import Call, Known, Step
from scrimp._trace import Trace
from scrimp.errors import BudgetError

if TYPE_CHECKING:
    from scrimp._budget_session import BudgetSession


class Line(threading.local):
    """The step that is in progress in this thread."""

    step: Step | None = None
    owner: BudgetSession | None = None
    depth = 0
    """How many calls that a budget is for run now, one inside the other."""


line = Line()


@dataclass(frozen=True, slots=True)
class Scheme:
    """A plan for a known step.

    Attributes:
        trace: what the plan is for; its resident part is what was there when it was made.
        plan: the plan.
        limit: bytes that the device may hold.
        covers: bytes before the step up to which the plan is within the limit.
        policy: does what the plan says; each step has a copy, since it takes notes.
    """

    trace: Trace
    plan: Plan
    limit: int
    covers: int
    policy: Planned


@final
class Book:
    """What a session knows of its steps."""

    def __init__(self) -> None:
        self.known: dict[object, Known] = {}
        self.schemes: dict[Known, Scheme] = {}
        """The latest plan for each."""
        self.unplannable: dict[Known, tuple[int, BudgetError]] = {}
        """The room above what was there before for which no plan was found, and the error that said so."""
        self.settled: dict[Known, int] = {}
        """How often what is there before it was looked up."""
        self.carried_out: dict[Known, int] = {}
        """In how many steps its plan was followed."""
        self.measured: dict[Known, Measured] = {}
        """What its planned steps took."""
        self.latest: Known | None = None

    def find(self, call: Call) -> Known | None:
        """Return what is known of a step that begins with a call, after the latest one."""
        return self.known.get((self.latest, call)) or self.known.get(call)

    def add(self, known: Known, after: Known | None) -> None:
        """Write down a step."""
        self.known[after, known.calls[0]] = known
        self.known[known.calls[0]] = known
        self.latest = known

    def forget(self, known: Known) -> None:
        """Take back what turned out to differ from time to time."""
        for key in [key for key, value in self.known.items() if value is known]:
            del self.known[key]
        for notes in (self.schemes, self.unplannable, self.settled, self.carried_out, self.measured):
            notes.pop(known, None)
