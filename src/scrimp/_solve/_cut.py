"""Which values to drop when each kept byte has a price: a minimum cut.

A value that backward asks for is either kept, at its price, or the op that makes it runs again, and with it
the ops of that op's unsaved inputs (saved inputs answer for themselves). An op's seconds are paid once
however many values need it, so the best set of ops to run again is a maximum closure: profit the prices
saved, cost the seconds. An unsaved value may be **held**, at its price: then the ops that read it can run again
without the op that makes it.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import (  # type: ignore[import-untyped]
    breadth_first_order,
    connected_components,
    maximum_flow,
)

from .._index import Index

__all__ = ["Cuts"]

_TOTAL: Final = 1_000_000_000  # all seconds together, in the integers of the flow, which has 32 bits
_ENDLESS: Final = 2**31 - 1


@final
class Cuts:
    """The cut problem of a trace, for any prices.

    Attributes:
        values: those that are kept or dropped, in the order of their ids; after them the unsaved ones that may be held,
            which count as dropped where they are not.
        is_held: which of ``values`` are of the latter kind.
    """

    def __init__(self, facts: Index) -> None:
        self.facts: Final = facts
        saved = sorted(value for value in facts.droppable if facts.size[value])
        held = sorted(facts.holdable)
        self.values: Final = np.array([*saved, *held], dtype=np.int64)
        self.is_held: Final = np.arange(len(self.values)) >= len(saved)
        self._owner = np.array([facts.owner[value] for value in self.values], dtype=np.int64)
        self._is_unpacked = np.array([bool(facts.unpacks[value]) for value in self.values], dtype=bool)
        seconds = np.array([op.seconds for op in facts.trace.ops])
        self._scale = _TOTAL / max(float(seconds.sum()), 1e-30)
        self._seconds = np.floor(seconds * self._scale).astype(np.int64)
        node = {value: len(seconds) + number for number, value in enumerate(held)}
        needs = {
            (op, node.get(read, facts.owner[read]))
            for op, reads in enumerate(facts.reads)
            if facts.replayable[op]
            for read in reads
            if facts.saved_at[read] < 0 and facts.replayable[facts.owner[read]]
        }
        self._needs = np.array(sorted(needs), dtype=np.int64).reshape(-1, 2)

    def groups(self) -> list[tuple[int, ...]]:
        """The values, put together where one op or unsaved values tie their replays to each other."""
        count = len(self.facts.trace.ops) + int(self.is_held.sum())
        tails, heads = self._edges()
        ties = csr_array((np.ones(len(tails)), (tails, heads)), shape=(count, count))
        _, group_of = connected_components(ties, directed=False)
        groups: dict[int, list[int]] = {}
        saved = ~self.is_held
        for value, owner in zip(self.values[saved].tolist(), self._owner[saved].tolist(), strict=True):
            groups.setdefault(int(group_of[owner]), []).append(value)
        return [tuple(group) for group in groups.values()]

    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """From ops to what their replay needs, and from values that may be held to the ops that make them."""
        nodes = len(self.facts.trace.ops) + np.arange(int(self.is_held.sum()))
        return (
            np.concatenate([self._needs[:, 0], nodes]),
            np.concatenate([self._needs[:, 1], self._owner[self.is_held]]),
        )

    def solve(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
        """The best set of values to drop, as a mask, and a lower bound of what it leaves to pay.

        Args:
            prices: seconds that keeping each of ``values`` costs.

        Returns:
            The mask; and a number that is at most the least (seconds of ops run again + prices of values
            kept, or held).
        """
        ops = np.arange(len(self.facts.trace.ops))
        profit = np.zeros(len(ops))
        np.add.at(profit, self._owner[self._is_unpacked], prices[self._is_unpacked])
        gains, holding = (
            np.floor(np.minimum(price * self._scale, _TOTAL + 1)).astype(np.int64)
            for price in (profit, prices[self.is_held])
        )
        source = len(ops) + len(holding)
        sink = source + 1
        needing, needed = self._edges()
        tails = np.concatenate([np.full(len(ops), source), ops, needing])
        heads = np.concatenate([ops, np.full(len(ops), sink), needed])
        capacity = np.concatenate([gains, self._seconds, np.full(len(self._needs), _ENDLESS), holding])
        graph = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
        result = maximum_flow(graph, source, sink)
        residual = graph - result.flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = np.zeros(sink + 1, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        run_again = reached[self._owner]
        dropped = (run_again | ~self._is_unpacked) & (prices > 0)
        dropped[self.is_held] = run_again[self.is_held] | ~reached[len(ops) : source]
        return dropped, result.flow_value / self._scale

    def seconds(self, dropped: NDArray[np.bool_]) -> float:
        """Seconds of the ops that must run at least once more when these of ``values`` are dropped."""
        needed: set[int] = set()
        stack = self._owner[dropped & self._is_unpacked].tolist()
        held = set(self.values[self.is_held & ~dropped].tolist())
        facts = self.facts
        while stack:
            op = stack.pop()
            if op not in needed:
                needed.add(op)
                stack += [
                    facts.owner[read]
                    for read in facts.reads[op]
                    if facts.saved_at[read] < 0 and facts.replayable[facts.owner[read]] and read not in held
                ]
        return sum(facts.trace.ops[op].seconds for op in needed)
