"""Which values to drop when each kept byte has a price: a minimum cut.

A value that backward asks for is either kept, at its price, or the op that makes it runs again, and with it
the ops of that op's unsaved inputs (saved inputs answer for themselves). An op's seconds are paid once
however many values need it, so the best set of ops to run again is a maximum closure: profit the prices
saved, cost the seconds.
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
    """The cut problem of a trace, for any prices."""

    def __init__(self, facts: Index) -> None:
        self.facts: Final = facts
        self.values: Final = np.array(sorted(value for value in facts.droppable if facts.size[value]), dtype=np.int64)
        self._owner = np.array([facts.owner[value] for value in self.values], dtype=np.int64)
        self._is_unpacked = np.array([bool(facts.unpacks[value]) for value in self.values], dtype=bool)
        seconds = np.array([op.seconds for op in facts.trace.ops])
        self._scale = _TOTAL / max(float(seconds.sum()), 1e-30)
        self._seconds = np.floor(seconds * self._scale).astype(np.int64)
        pairs = [
            (op, facts.owner[read])
            for op, reads in enumerate(facts.reads)
            if facts.replayable[op]
            for read in reads
            if facts.saved_at[read] < 0 and facts.replayable[facts.owner[read]]
        ]
        self._edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def groups(self) -> list[tuple[int, ...]]:
        """The values, put together where one op or unsaved values tie their replays to each other."""
        count = len(self.facts.trace.ops)
        ties = csr_array((np.ones(len(self._edges)), (self._edges[:, 0], self._edges[:, 1])), shape=(count, count))
        _, group_of = connected_components(ties, directed=False)
        groups: dict[int, list[int]] = {}
        for value, owner in zip(self.values.tolist(), self._owner.tolist(), strict=True):
            groups.setdefault(int(group_of[owner]), []).append(value)
        return [tuple(group) for group in groups.values()]

    def solve(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
        """The best set of values to drop, as a mask, and a lower bound of what it leaves to pay.

        Args:
            prices: seconds that keeping each of ``values`` costs.

        Returns:
            The mask; and a number that is at most the least (seconds of ops run again + prices of values
            kept).
        """
        count = len(self.facts.trace.ops)
        profit = np.zeros(count)
        np.add.at(profit, self._owner[self._is_unpacked], prices[self._is_unpacked])
        gains = np.floor(np.minimum(profit * self._scale, _TOTAL + 1)).astype(np.int64)
        source, sink = count, count + 1
        ops = np.arange(count)
        tails = np.concatenate([np.full(count, source), ops, self._edges[:, 0]])
        heads = np.concatenate([ops, np.full(count, sink), self._edges[:, 1]])
        capacity = np.concatenate([gains, self._seconds, np.full(len(self._edges), _ENDLESS)])
        graph = csr_array((capacity.astype(np.int32), (tails, heads)), shape=(count + 2, count + 2))
        result = maximum_flow(graph, source, sink)
        residual = graph - result.flow
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        run_again = np.zeros(count + 2, dtype=bool)
        run_again[breadth_first_order(residual, source, return_predecessors=False)] = True
        dropped = (run_again[self._owner] | ~self._is_unpacked) & (prices > 0)
        return dropped, result.flow_value / self._scale

    def seconds(self, dropped: NDArray[np.bool_]) -> float:
        """Seconds of the ops that must run at least once more when these of ``values`` are dropped."""
        needed: set[int] = set()
        stack = self._owner[dropped & self._is_unpacked].tolist()
        facts = self.facts
        while stack:
            op = stack.pop()
            if op not in needed:
                needed.add(op)
                stack += [
                    facts.owner[read]
                    for read in facts.reads[op]
                    if facts.saved_at[read] < 0 and facts.replayable[facts.owner[read]]
                ]
        return sum(facts.trace.ops[op].seconds for op in needed)
