"""When remembering earlier steps is worth what it costs.

Accelerated methods combine earlier directions, so they gain where directions come back. On a real spectrum they soon
do. On a spectrum spread over a disk they don't until the memory spans a good share of all unknowns: there plain
steps are nearly as few, and where f is cheap much faster. Which it is shows in how much of the newest residual the
differences of the last few could cancel.
"""

from __future__ import annotations

import math

# How many states that question is put to; Anderson's method then begins with them.
REMEMBERED = 4
# Plain steps go on while cancelling would leave more than this share of the residual on average,
KEEN = 0.45
# while the steps missing are fewer than this share of the unknowns, and where a sample has many of these.
SHARE, WIDE = 0.5, 256
# How many differences Anderson's method remembers on slow problems: more where a sample has fewer unknowns than that.
DEEP, DEEP_WIDE = 24, 15
# Where a sample has many unknowns only every so many of Anderson's steps are combined.
EVERY = 3
# Over how many steps the pace is measured.
SPAN = 8


def steps_missing(worst: list[float]) -> float:
    """How many steps are missing at the pace of the last ones, given the worst ratio of residual to goal after each."""
    span = min(len(worst) - 1, SPAN)
    if span < 1 or not 0 < worst[-1] < worst[-1 - span] < math.inf:
        return math.inf
    return max(0.0, math.log(worst[-1]) / math.log(worst[-1 - span] / worst[-1]) * span)
