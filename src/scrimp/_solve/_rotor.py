"""Schedules for chains that recompute a block more than once: rotor's dynamic programme over a band.

``C(s, t, m)``: least seconds to run blocks ``s`` to ``t`` forward and backward, with the entry of ``s`` there
and ``m`` bytes for all else. Either block ``s`` retains one of its options and the entry of ``s + 1``; or
blocks are passed without retaining anything up to an entry ``p``, which is retained, ``p`` to ``t`` are done,
and then ``s`` to ``p - 1`` from a new replay. Splits longer than the band hardly ever pay. Bytes are rounded
to a grid; the simulator judges the outcome in exact bytes.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .._index import Index
from .._plan import Decision, Drop, Keep
from ._blocks import Block, Menu

__all__ = ["Rotor"]

_COARSE: Final = 256  # points of the grid of bytes that are enough
_FINEST: Final = 2048  # and the most, where entries would otherwise round to nothing


@final
class Rotor:
    """The schedules of one chain for one number of bytes."""

    def __init__(
        self, facts: Index, blocks: tuple[Block, ...], menus: tuple[Menu, ...], nbytes: int, band: int
    ) -> None:
        self.facts: Final = facts
        self.blocks: Final = blocks
        self.menus: Final = menus
        self._entry = [0 if block.entry is None else facts.size[block.entry] for block in blocks]
        least = min(menu.backward_need for menu in menus)
        self._quantum = _quantum(max(nbytes - least, 1), min((size for size in self._entry if size), default=1))
        points = int(max(nbytes - least, 0) / self._quantum) + 1
        self._bytes = nbytes - self._quantum * np.arange(points, -1, -1)
        self._band = band
        self._choices: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._near = np.full((len(blocks), min(band, len(blocks)), len(self._bytes)), np.inf)
        """The seconds for a block and so many after it."""
        self._whole = np.full((len(blocks), len(self._bytes)), np.inf)
        """The seconds for a block and all after it."""
        self._fill()

    def decisions(self) -> dict[int, Decision] | None:
        """The best schedule as a plan; ``None`` where nothing fits."""
        last = len(self.blocks) - 1
        if not np.isfinite(self._whole[0, -1]):
            return None
        plan: dict[int, Decision] = {}
        passed = [0] * len(self.blocks)
        pending = [(0, last, len(self._bytes) - 1, False)]
        while pending:
            self._visit(*pending.pop(), plan, passed, pending)
        return plan

    def _shift(self, nbytes: int) -> int:
        return round(nbytes / self._quantum)

    def _fill(self) -> None:
        count = len(self.blocks)
        for length in range(min(self._band, count)):
            for first in range(count - length):
                self._solve(first, first + length)
        for first in range(count - 1, -1, -1):
            if (first, count - 1) not in self._choices:
                self._solve(first, count - 1)

    def _solve(self, first: int, last: int) -> None:
        """Find the best for blocks ``first`` to ``last``: seconds, and the choice made, at each point of the grid."""
        menu = self.menus[first]
        fits = self._bytes >= menu.backward_need
        if first == last:
            self._choices[first, last] = np.zeros(len(fits), dtype=np.int64)
            self._put(first, last, np.where(fits, menu.forward, np.inf))
            return
        options = len(menu.options)
        nearest = min(last, first + self._band)
        table = np.full((options + nearest - first, len(fits)), np.inf)
        following = self._done_to(last, first + 1, first + 2)[0]
        for row, (_, nbytes, replayed) in enumerate(menu.options):
            shift = self._shift(nbytes + self._entry[first + 1])
            table[row, shift:] = following[: max(len(fits) - shift, 0)] + (menu.forward + replayed)
        table[:options, ~fits] = np.inf
        passing = np.cumsum([self.menus[block].forward for block in range(first, nearest)])
        splits = self._done_to(last, first + 1, nearest + 1) + passing[:, None]
        shifts = np.array([self._shift(self._entry[entry]) for entry in range(first + 1, nearest + 1)])
        for shift in np.unique(shifts):  # equal blocks have equal entries, so this is one shift or a few
            rows = np.flatnonzero(shifts == shift)
            table[options + rows, shift:] = splits[rows, : max(len(fits) - shift, 0)]
        table[options:] += self._near[first, : nearest - first]
        choice = table.argmin(axis=0)
        self._choices[first, last] = choice
        self._put(first, last, table[choice, np.arange(len(choice))])

    def _put(self, first: int, last: int, seconds: NDArray[np.float64]) -> None:
        if last - first < self._band:
            self._near[first, last - first] = seconds
        if last == len(self.blocks) - 1:
            self._whole[first] = seconds

    def _done_to(self, last: int, first: int, end: int) -> NDArray[np.float64]:
        """Return the seconds for the blocks from each of ``first`` to ``end - 1``, up to ``last``."""
        if last == len(self.blocks) - 1:
            return self._whole[first:end]
        entries = np.arange(first, end)
        return self._near[entries, last - entries]

    def _visit(
        self,
        first: int,
        last: int,
        point: int,
        is_replay: bool,
        plan: dict[int, Decision],
        passed: list[int],
        pending: list[tuple[int, int, int, bool]],
    ) -> None:
        """Follow one choice. ``passed`` counts the replays that went through each block so far."""
        block, menu = self.blocks[first], self.menus[first]
        if first == last:
            self._retain(block.values, menu, passed[first], is_replay, plan)
            return
        choice = int(self._choices[first, last][point])
        if choice < len(menu.options):
            retained, nbytes, _ = menu.options[choice]
            self._retain(retained, menu, passed[first], is_replay, plan)
            self._retain(set(block.values) - retained, menu, passed[first] + is_replay, True, plan)
            self._retain_entry(first + 1, passed, is_replay, plan)
            passed[first] += is_replay
            point -= self._shift(nbytes + self._entry[first + 1])
            pending.append((first + 1, last, point, is_replay))
            return
        entry = first + 1 + choice - len(menu.options)
        for between in range(first + 1, entry):  # passed now, retained by the visit that comes back
            plan.setdefault(self._value(between), Drop())
        self._retain_entry(entry, passed, is_replay, plan)
        for between in range(first, entry):
            passed[between] += is_replay
        pending.append((first, entry - 1, point, True))
        pending.append((entry, last, point - self._shift(self._entry[entry]), is_replay))

    def _value(self, block: int) -> int:
        value = self.blocks[block].entry
        assert value is not None, "only the first block has no entry, and nothing hands to it"
        return value

    def _retain_entry(self, block: int, passed: list[int], is_replay: bool, plan: dict[int, Decision]) -> None:
        plan[self._value(block)] = Drop(passed[block - 1]) if is_replay else Keep()

    def _retain(
        self,
        values: frozenset[int] | tuple[int, ...] | set[int],
        menu: Menu,
        passes: int,
        is_replay: bool,
        plan: dict[int, Decision],
    ) -> None:
        for value in values:
            is_passed = self.facts.owner[value] in menu.on_path
            plan[value] = Drop(passes if is_passed else 0) if is_replay else Keep()


def _quantum(span: int, smallest: int) -> float:
    """Bytes between points: a fraction of the smallest entry, lest equal entries all round one way."""
    if span / smallest > _FINEST:
        return span / _FINEST
    return smallest / max(1, _COARSE * smallest // span)
