"""Schedules for chains that recompute a block more than once: rotor's dynamic programme over a band.

``C(s, t, m)``: least seconds to run blocks ``s`` to ``t`` forward and backward, with the entry of ``s`` there
and ``m`` bytes for all else. Either block ``s`` retains one of its options and the entry of ``s + 1``; or
blocks are passed without retaining anything up to an entry ``p``, which is retained, ``p`` to ``t`` are done,
and then ``s`` to ``p - 1`` from a new replay. Splits longer than the band hardly ever pay. Bytes are rounded
to a grid; the simulator judges the outcome in exact bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .._index import Index
from .._plan import Decision, Drop, Keep
from ._blocks import Block, Menu

__all__ = ["Rotor"]

_COARSE: Final = 256  # points of the grid of bytes that are enough
_FINEST: Final = 2048  # and the most, where entries would otherwise round to nothing


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """The best for blocks s to t: seconds, and the choice made, for each point of the grid."""

    seconds: NDArray[np.float64]
    choice: NDArray[np.int64]


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
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._fill()

    def decisions(self) -> dict[int, Decision] | None:
        """The best schedule as a plan; ``None`` where nothing fits."""
        last = len(self.blocks) - 1
        if not np.isfinite(self._cells[0, last].seconds[-1]):
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
                self._cells[first, first + length] = self._cell(first, first + length)
        for first in range(count - 1, -1, -1):
            if (first, count - 1) not in self._cells:
                self._cells[first, count - 1] = self._cell(first, count - 1)

    def _cell(self, first: int, last: int) -> _Cell:
        menu = self.menus[first]
        fits = self._bytes >= menu.backward_need
        if first == last:
            seconds = np.where(fits, menu.forward, np.inf)
            return _Cell(seconds, np.zeros(len(seconds), dtype=np.int64))
        nearest = min(last, first + self._band)
        table = np.full((len(menu.options) + nearest - first, len(self._bytes)), np.inf)
        following = self._cells[first + 1, last].seconds
        for row, (_, nbytes, replayed) in enumerate(menu.options):
            _put_shifted(table[row], following, self._shift(nbytes + self._entry[first + 1]))
            table[row] += np.where(fits, menu.forward + replayed, np.inf)
        passing = 0.0
        for row, entry in enumerate(range(first + 1, nearest + 1), start=len(menu.options)):
            passing += self.menus[entry - 1].forward
            _put_shifted(table[row], self._cells[entry, last].seconds, self._shift(self._entry[entry]))
            table[row] += self._cells[first, entry - 1].seconds
            table[row] += passing
        choice = table.argmin(axis=0)
        return _Cell(np.take_along_axis(table, choice[None], axis=0)[0], choice)

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
        choice = int(self._cells[first, last].choice[point])
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


def _put_shifted(row: NDArray[np.float64], seconds: NDArray[np.float64], shift: int) -> None:
    """Into a row of infinities, what takes ``seconds``, but with ``shift`` points fewer bytes."""
    row[shift:] = seconds[: max(len(seconds) - shift, 0)]
