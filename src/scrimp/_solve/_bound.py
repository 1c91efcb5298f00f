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

from .._index import Index
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
    """Levels of the relaxed step: a dropped value takes nothing from its natural end to its last release.

    An unsaved value that is held takes its bytes as long as it must at least.
    """

    def __init__(self, cuts: Cuts, plain: Timeline) -> None:
        facts = cuts.facts
        self._moments = facts.moments
        least = _least_ends(facts)
        last = [least[v] if held else facts.last_release[v] for v, held in zip(cuts.values, cuts.is_held, strict=True)]
        self.starts: Final = np.array([facts.natural_end[value] + 1 for value in cuts.values], dtype=np.int64)
        self.ends: Final = np.maximum(np.array(last, dtype=np.int64) + 1, self.starts)
        self.sizes: Final = np.array([facts.size[value] for value in cuts.values], dtype=np.int64)
        self.all_kept: Final = plain.levels + self._standing(cuts.is_held)
        self.all_dropped: Final = self.levels(np.ones(len(cuts.values), dtype=bool))

    def levels(self, dropped: NDArray[np.bool_]) -> NDArray[np.int64]:
        return self.all_kept - self._standing(dropped)

    def _standing(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Bytes of some of the values at each moment."""
        change = np.zeros(self._moments + 2, dtype=np.int64)
        np.add.at(change, self.starts[chosen], self.sizes[chosen])
        np.subtract.at(change, self.ends[chosen], self.sizes[chosen])
        standing: NDArray[np.int64] = np.cumsum(change)[: self._moments]
        return standing


def _least_ends(facts: Index) -> list[int]:
    """Per unsaved value, the last moment at which it is there at least, if it is held and a replay starts from it.

    What is held stays until the last release of each dropped value that is replayed from it. One of them is the first
    that autograd saves on some way from it.
    """
    least = [facts.moments if at < 0 else facts.last_release[value] for value, at in enumerate(facts.saved_at)]
    for op in range(len(facts.reads) - 1, -1, -1):
        if facts.replayable[op]:
            needed = min((least[value] for value in facts.outputs[op]), default=facts.moments)
            for value in facts.reads[op]:
                if facts.saved_at[value] < 0:
                    least[value] = min(least[value], needed)
    return least


def lower_bound_of_peak(cuts: Cuts, plain: Timeline) -> int:
    """Bytes that every plan of keeps and drops needs at some moment."""
    return int(Relaxed(cuts, plain).all_dropped.max())


def lower_bound(cuts: Cuts, plain: Timeline, budget: int, rounds: int = 16) -> Bound:
    """The bound for a budget, from at most ``rounds`` cuts."""
    facts = cuts.facts
    relaxed = Relaxed(cuts, plain)
    everything = np.ones(len(cuts.values), dtype=bool)
    drop_sets = [cuts.is_held.copy(), everything]
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
        value = float(multipliers @ (relaxed.all_kept[rows[: len(multipliers)]] - budget)) - float(prices.sum()) + least
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
