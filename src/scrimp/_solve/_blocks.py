"""Cut a step into a chain of blocks that hand one saved value to each other, where it is one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._index import Index
from ._bound import Relaxed
from ._cut import Cuts

__all__ = ["Block", "Menu", "find_blocks", "menu_of"]

_GLOBAL = 0.3  # a value read over more of the forward pass than this belongs to no block (masks, encodings)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive ops that read one value from before them (and global ones).

    Attributes:
        first: its first op.
        last: its last op.
        entry: the value handed to it; ``None`` for the first block.
        values: the droppable values that it makes, other than what it hands on.
    """

    first: int
    last: int
    entry: int | None
    values: tuple[int, ...]


def find_blocks(facts: Index) -> tuple[Block, ...]:
    """The finest chain of blocks; a single block where the step is no chain."""
    count = len(facts.reads)
    last_reader = [max(readers, default=-1) for readers in facts.readers]
    crossing: list[list[int]] = [[] for _ in range(count + 1)]
    for value, owner in enumerate(facts.owner):
        if owner < 0 or last_reader[value] - owner > _GLOBAL * count:
            continue
        for op in range(owner + 1, last_reader[value] + 1):
            crossing[op].append(value)
    entries: list[tuple[int, int | None]] = [(0, None)]
    for op in range(1, count):
        if len(crossing[op]) == 1 and crossing[op][0] in facts.droppable and crossing[op][0] != entries[-1][1]:
            entries.append((op, crossing[op][0]))
    handed = {entry for _, entry in entries}
    made: list[list[int]] = [[] for _ in entries]
    block_of = np.repeat(np.arange(len(entries)), np.diff([*(first for first, _ in entries), count]))
    for value in sorted(facts.droppable - handed):
        made[block_of[facts.owner[value]]].append(value)
    ends = [first - 1 for first, _ in entries[1:]] + [count - 1]
    return tuple(
        Block(first, last, entry, tuple(values))
        for (first, entry), last, values in zip(entries, ends, made, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """What a block costs in a chain's schedule.

    Attributes:
        forward: seconds to run it through, from its entry to the next block's.
        backward_need: most bytes while backward is in the block with all that it makes there, but its entry.
        on_path: the ops that a pass through the block runs.
        options: sets of values to retain; each with its bytes and the seconds that backward then replays.
    """

    forward: float
    backward_need: int
    on_path: frozenset[int]
    options: tuple[tuple[frozenset[int], int, float], ...]


def menu_of(
    cuts: Cuts, relaxed: Relaxed, block: Block, hands_on: int | None, drop_sets: Iterable[NDArray[np.bool_]]
) -> Menu:
    """The options of a block, taken from the cuts of the whole step."""
    facts = cuts.facts
    inside = set(block.values)
    on_path = _on_path(facts, block, hands_on)
    found: dict[tuple[int, float], frozenset[int]] = {}
    mine = np.isin(cuts.values, sorted(inside))
    for mask in drop_sets:
        retained = inside - set(cuts.values[mask & mine].tolist())
        nbytes = sum(facts.size[value] for value in retained)
        found.setdefault((nbytes, cuts.seconds((mask & mine) | cuts.is_held)), frozenset(retained))
    return Menu(
        forward=sum(facts.trace.ops[op].seconds for op in on_path),
        backward_need=_backward_need(facts, relaxed, block),
        on_path=on_path,
        options=tuple((values, nbytes, seconds) for (nbytes, seconds), values in sorted(found.items())),
    )


def _on_path(facts: Index, block: Block, hands_on: int | None) -> frozenset[int]:
    """Ops of the block that its handed-on value comes from; for the last block, all."""
    if hands_on is None:
        return frozenset(range(block.first, block.last + 1))
    found: set[int] = set()
    stack = [facts.owner[hands_on]]
    while stack:
        op = stack.pop()
        if op >= block.first and op not in found:
            found.add(op)
            stack += [facts.owner[read] for read in facts.reads[op] if read != block.entry]
    return frozenset(found)


def _backward_need(facts: Index, relaxed: Relaxed, block: Block) -> int:
    values = [*block.values, *([block.entry] if block.entry is not None else [])]
    unpacks = [facts.unpacks[value][0] for value in values if facts.unpacks[value]]
    if not unpacks:
        return 0
    first = min(unpacks)
    last = min(max(facts.last_release[value] for value in values) + 1, facts.moments)
    levels = relaxed.all_dropped[first:last].copy()
    for value in block.values:
        start = max(facts.natural_end[value] + 1 - first, 0)
        levels[start : max(facts.last_release[value] + 1 - first, 0)] += facts.size[value]
    return int(levels.max(initial=0))
