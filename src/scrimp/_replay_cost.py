"""What one replay computes, in which order, and what it costs: seconds, peak, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

from ._index import Index

__all__ = ["ReplayCost", "needed_ops", "replay_cost"]


class ReplayCost(NamedTuple):
    """A replay, as the timeline sees it.

    Attributes:
        seconds: of its ops.
        peak: most bytes at one of its moments above what was there when it began.
        net: bytes of the values that it leaves behind.
    """

    seconds: float
    peak: int
    net: int


def needed_ops(index: Index, target: int, is_present: Callable[[int], bool]) -> tuple[list[int], set[int]]:
    """The ops, in forward order, that compute ``target`` from present values; and those values."""
    owner, reads = index.owner, index.reads  # this and what follows are where planning spends its time
    needed: set[int] = set()
    starts: set[int] = set()
    seen = {target}
    stack = [owner[target]]
    while stack:
        op = stack.pop()
        if op in needed:
            continue
        needed.add(op)
        for value in reads[op]:
            if value in seen:
                continue
            seen.add(value)
            if is_present(value):
                starts.add(value)
            else:
                stack.append(owner[value])
    return sorted(needed), starts


def replay_cost(index: Index, ops: list[int], starts: Container[int], remaining: Container[int]) -> ReplayCost:
    """Run ``ops``: each intermediate goes right after its last use, those ``remaining`` stay.

    An in-place op moves its input's bytes to its output: the version that it overwrites is never present for
    others, because a version that is saved, or that cannot be replayed, is not overwritten before a
    replayable op.
    """
    size, reads, outputs, fresh, trace_ops = index.size, index.reads, index.outputs, index.fresh, index.trace.ops
    last_use = {value: op for op in ops for value in reads[op] if value not in starts}
    level = peak = 0
    seconds = 0.0
    for op in ops:
        made = trace_ops[op]
        seconds += made.seconds
        high = level + fresh[op] + made.transient
        if high > peak:
            peak = high
        for value in outputs[op]:
            if value in last_use or value in remaining:
                level += size[value]
        for value in reads[op]:
            if value not in starts and last_use[value] == op and value not in remaining:
                level -= size[value]
    return ReplayCost(seconds, peak, level)
