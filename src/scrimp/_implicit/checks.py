"""What numbers options may be."""

from __future__ import annotations

import math


def need_count(what: str, value: object, least: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number; have {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}; have {value}")


def need_positive(what: str, value: object, below: float = math.inf) -> None:
    """Raise unless ``value`` is a number above zero and below a limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number; have {value!r}")
    if not 0 < value < below:
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise ValueError(f"{what} must be more than 0{limit}; have {value}")
