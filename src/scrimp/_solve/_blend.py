"""Between a plan that fits and a faster one that does not: as much of the faster one as fits."""

from __future__ import annotations

from collections.abc import Mapping

from .._index import Index
from .._plan import Decision, Keep
from .._simulate import simulate_index

__all__ = ["blend"]


def blend(
    facts: Index,
    fitting: Mapping[int, Decision],
    faster: Mapping[int, Decision],
    groups: list[tuple[int, ...]],
    budget: int,
) -> dict[int, Decision]:
    """``fitting`` for the first groups and ``faster`` for the rest, with as few first groups as fit.

    Equal blocks make all their decisions alike, so neighbouring cuts differ by all blocks at once; this finds
    how many blocks have to pay. The first ones do: what they save is held longest.
    """
    differing = [group for group in groups if any(_of(fitting, value) != _of(faster, value) for value in group)]

    def mixture(count: int) -> dict[int, Decision]:
        mixed = dict(faster)
        for group in differing[:count]:
            mixed.update({value: _of(fitting, value) for value in group})
        return mixed

    few, many = 0, len(differing)
    while few + 1 < many:
        middle = (few + many) // 2
        if simulate_index(facts, mixture(middle)).peak <= budget:
            many = middle
        else:
            few = middle
    return mixture(many)


def _of(decisions: Mapping[int, Decision], value: int) -> Decision:
    return decisions.get(value, Keep())
