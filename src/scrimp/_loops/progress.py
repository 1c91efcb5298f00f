"""Telling the user how far a loop is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import final

from scrimp._loops.patience import Patience


class Phase(Enum):
    """Which way a loop goes."""

    FORWARD = "forward"
    BACKWARD = "backward"


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a loop is. ``total`` is None while nobody knows; ``repeated`` counts steps that backward ran again."""

    phase: Phase
    done: int
    total: int | None
    repeated: int = 0


@final
@dataclass(slots=True)
class Report:
    """Calls the user's function, if there is one."""

    to: Callable[[Progress], None] | None
    total: int | None
    repeated: int = 0

    def forward(self, done: int, patience: Patience) -> None:
        """One step was run."""
        if self.to is not None:
            patience.call(self.to, Progress(Phase.FORWARD, done, self.total))

    def backward(self, done: int, total: int, patience: Patience) -> None:
        """One step was reversed."""
        if self.to is not None:
            patience.call(self.to, Progress(Phase.BACKWARD, done, total, self.repeated))
