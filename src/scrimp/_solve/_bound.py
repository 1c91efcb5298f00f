"""A proof of how fast a plan within a budget can be at best.

At a moment, a value that was saved before and is released after is there, or the op that makes it runs at
least once
more: true for keeping and dropping, however often something is replayed. Relaxed to these facts, the fastest
plan is a linear programme over mixtures of drop sets; its columns are cuts (:mod:`._cut`) and its rows the
moments that bind. Every price vector that the programme passes through gives a valid lower bound; the best
one is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog  # type: ignore[import-untyped]

from .._simulate import Timeline
from ._cut import Cuts

__all__ = ["Bound", "Relaxed", "lower_bound", "lower_bound_of_peak"]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What the relaxation says.

    Attributes:
        added_seconds: no plan of keeps and drops within the budget adds less; infinite if none is within it.
        drop_sets: the cuts met on the way, as masks over ``Cuts.values``: good plans to start from.
    """

    added_seconds: float
    drop_sets: tuple[NDArray[np.bool_], ...]


@final
class Relaxed:
    """Levels of the relaxed step: a dropped value takes nothing from its natural end to its last release."""

    def __init__(self, cuts: Cuts, plain: Timeline) -> None:
        facts = cuts.facts
        self._plain = plain
        self.starts: Final = np.array([facts.natural_end[value] + 1 for value in cuts.values], dtype=np.int64)
        ends = np.array([facts.last_release[value] + 1 for value in cuts.values], dtype=np.int64)
        self.ends: Final = np.maximum(ends, self.starts)
        self.sizes: Final = np.array([facts.size[value] for value in cuts.values], dtype=np.int64)
        self.all_dropped: Final = self.levels(np.ones(len(cuts.values), dtype=bool))

    def levels(self, dropped: NDArray[np.bool_]) -> NDArray[np.int64]:
        moments = len(self._plain.levels)
        change = np.zeros(moments + 2, dtype=np.int64)
        np.subtract.at(change, self.starts[dropped], self.sizes[dropped])
        np.add.at(change, self.ends[dropped], self.sizes[dropped])
        levels: NDArray[np.int64] = self._plain.levels + np.cumsum(change)[:moments]
        return levels


def lower_bound_of_peak(cuts: Cuts, plain: Timeline) -> int:
    """Bytes that every plan of keeps and drops needs at some moment."""
    return int(Relaxed(cuts, plain).all_dropped.max())


def lower_bound(cuts: Cuts, plain: Timeline, budget: int, rounds: int = 16) -> Bound:
    """The bound for a budget, from at most ``rounds`` cuts."""
    facts = cuts.facts
    relaxed = Relaxed(cuts, plain)
    everything = np.ones(len(cuts.values), dtype=bool)
    drop_sets = [np.zeros_like(everything), everything]
    levels = [relaxed.levels(drop_set) for drop_set in drop_sets]
    costs = [cuts.seconds(drop_set) for drop_set in drop_sets]
    if int(levels[1].max()) > budget:
        return Bound(np.inf, tuple(drop_sets))
    if int(levels[0].max()) <= budget:
        return Bound(0.0, tuple(drop_sets))
    rows = [int(levels[0].argmax())]
    best = 0.0
    for _ in range(rounds):
        weights, multipliers = _master(np.array(costs), np.array(levels)[:, rows] - budget)
        mixture = np.tensordot(weights, np.array(levels), axes=1)
        worst = int(mixture.argmax())
        found_row = mixture[worst] > budget * (1 + 1e-9) and worst not in rows
        if found_row:
            rows.append(worst)
        price_at = np.zeros(facts.moments + 2)
        price_at[np.array(rows[: len(multipliers)]) + 1] = multipliers
        paid = np.cumsum(price_at)
        prices = relaxed.sizes.astype(np.float64) * np.maximum(paid[relaxed.ends] - paid[relaxed.starts], 0.0)
        dropped, least = cuts.solve(prices)
        value = float(multipliers @ (plain.levels[rows[: len(multipliers)]] - budget)) - float(prices.sum()) + least
        best = max(best, value)
        upper = float(weights @ np.array(costs))
        if value >= upper * (1 - 1e-4) and not found_row:
            break
        drop_sets.append(dropped)
        levels.append(relaxed.levels(dropped))
        costs.append(cuts.seconds(dropped))
    return Bound(best, tuple(drop_sets))


def _master(costs: NDArray[np.float64], over: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights of the best mixture of drop sets, and the price of a byte at each row."""
    scale = max(float(np.abs(over).max()), 1.0)
    result = linprog(
        costs, A_ub=over.T / scale, b_ub=np.zeros(over.shape[1]), A_eq=np.ones((1, len(costs))), b_eq=[1.0]
    )
    return result.x, np.maximum(-result.ineqlin.marginals, 0.0) / scale
