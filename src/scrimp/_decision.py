"""What a policy can answer. Plain data: no torch here."""

from __future__ import annotations

from enum import Enum


class Decision(Enum):
    """What becomes of a value."""

    KEEP = "keep"
    DROP = "drop"


KEEP = Decision.KEEP
DROP = Decision.DROP
