"""Holding a device under a budget while a step runs: room is made before it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch._ops import OpOverload

from scrimp._below import passed_on
from scrimp._budget import format_bytes
from scrimp._cost import replay_seconds
from scrimp._elsewhere import Elsewhere
from scrimp._live import users
from scrimp._meter import Meter
from scrimp._predict import Forecast
from scrimp._replay import Replay
from scrimp._scope import Control, Scope
from scrimp._standing import Standing, lines_of
from scrimp._value import Timing, Value, secure
from scrimp.errors import BudgetError

R = TypeVar("R")

_AT_ONCE = Timing(free_at=0, fetch_at=None, turn=0)  # what is evicted goes now, and comes back when it is asked for
_SHARE_AFTER_FAILURE = 16  # of the budget: what is evicted at least when the allocator has failed


class Cost(NamedTuple):
    """What an operator took: marks on the device's clock, and bytes beyond those of its results."""

    start: Any
    end: Any
    transient: int


class Outlook(NamedTuple):
    """How many bytes a step takes, and who says so, as the beginning of a sentence."""

    nbytes: int
    source: str


@final
class Limiter(Scope):
    """A scope that keeps everything as long as the device has room, and evicts when something needs it.

    Args:
        control: of the session.
        meter: reads the device.
        budget: bytes that the device may hold; None for no limit.
        elsewhere: where evicted values go that take longer to compute again than to copy; None: all are dropped.
        awake: whether it watches the device. A step that follows its plan needs no watching.
    """

    __slots__ = (
        "_forecast", "_in_use", "_making_room", "_promised", "awake", "budget", "elsewhere", "meter", "outlook",
        "spare", "standing",
    )  # fmt: skip

    def __init__(
        self, control: Control, meter: Meter, budget: int | None, elsewhere: Elsewhere | None = None, awake: bool = True
    ) -> None:
        super().__init__(control, parent=None)
        self.meter = meter
        self.budget = budget
        self.elsewhere = elsewhere
        self.awake = awake and budget is not None
        self._forecast = Forecast(meter.block)
        self._in_use: Set[Value] = frozenset()
        self._making_room = False
        self._promised = 0
        self.spare = 0
        """Bytes of the budget for what operators take that nobody has seen yet."""
        self.standing: Callable[[], Iterable[Standing]] = tuple
        """Says what stands on the device, for an error."""
        self.outlook: Callable[[int], Outlook | None] = _unknown
        """Says what the whole step takes, given what it takes at one moment; None where nobody knows."""

    def room(self) -> int | None:
        """Return how many bytes a replay may leave behind."""
        if self.budget is None or not self.awake:
            return None
        return max(0, self.budget - self.meter.level() - self._promised)

    def admit(self, value: Value) -> bool:
        """Keep it, and remember that it can go."""
        if value.call is not None:
            self._unrated.append(value)
        return True

    def offer(self, value: Value) -> None:
        """Remember that a replayed value can go again."""
        self._unrated.append(value)

    # -- room -------------------------------------------------------------------------------------------------------

    @contextmanager
    def room_for(self, replay: Replay) -> Iterator[None]:
        """Have room for a replay, without taking away what it starts from."""
        self._in_use = frozenset(replay.starts())
        self._promised = replay.bytes_needed()
        try:
            self.make_room(self._promised)
            yield
        finally:
            self._in_use = frozenset()
            self._promised = 0

    def make_room_for(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make room for what an operator is about to make."""
        if self.awake and not self._making_room:
            made, within = self._forecast.needs(func, args, kwargs)
            self.make_room(made, within)

    def timed(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Cost]:
        """Run an operator, and say what it took of the device."""
        self.make_room_for(func, args, kwargs)
        meter = self.meter

        def attempt() -> tuple[Any, Cost]:
            level, requested = meter.level(), meter.requested()
            if meter.is_behind:
                meter.keep_busy(self._forecast.is_new(func, args, kwargs))
            start = meter.mark()
            result = passed_on(func, args, kwargs)
            end = meter.mark()
            within = max((meter.requested() - requested) - (meter.level() - level), 0) if requested else 0
            if within:
                self._forecast.learn(within, func, args, kwargs)
            return result, Cost(start, end, within)

        return self._retried(attempt, func, args, kwargs)

    def retried(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator again, with more and more evicted, for as long as the device runs out of memory."""
        return self._retried(lambda: passed_on(func, args, kwargs), func, args, kwargs)

    def _retried(self, attempt: Callable[[], R], func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
        """Call ``attempt``, which runs an operator, until it has enough memory, or nothing is left to evict.

        An operator that fails for want of memory has not done anything yet: kernels allocate before they compute.
        """
        if self.budget is None:
            return attempt()
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if not self._evict(max(self.budget or 0, self.meter.level()) // _SHARE_AFTER_FAILURE):
                    missing = sum(self._forecast.needs(func, args, kwargs))
                    raise self._impossible(missing, self.meter.in_pieces()) from error

    def make_room(self, nbytes: int, within: int = 0) -> None:
        """Evict until ``nbytes`` more fit into the budget.

        As long as something is left that could go, there is room for ``within`` and for what is to spare as well.
        """
        if self.budget is None or not self.awake or self._making_room:
            return
        self._making_room = True
        try:
            beyond = within + self.spare
            while (excess := self.meter.level() + nbytes + beyond - self.budget) > 0:
                if not self._evict(excess):
                    if excess > beyond:
                        raise self._impossible(nbytes)
                    break
        finally:
            self._making_room = False

    def _evict(self, nbytes: int) -> int:
        """Evict values until about ``nbytes`` are free; return how many bytes that gave."""
        freed = 0
        spared: list[Value] = []
        while freed < nbytes:
            chosen = self._choose(nbytes - freed, None)
            if not chosen:
                break
            for value in chosen:
                if value in self._in_use or not _would_be_free(value):
                    spared.append(value)
                else:
                    before = self.meter.level()
                    if not self._send(value) and (value.copy is not None or value.secured or secure(value)):
                        value.let_go(evicted=value.copy is None)
                    freed += max(before - self.meter.level(), 0)
        self._unrated.extend(spared)
        return freed

    def _send(self, value: Value) -> bool:
        """Send a value to a store if that is quicker than computing it again; tell whether it is gone."""
        store = None if self.elsewhere is None else self.elsewhere.store
        if store is None or value.copy is not None or torch._C._current_graph_task_id() != -1:
            return False
        assert self.elsewhere is not None
        if replay_seconds(value) * self.elsewhere.speed.out < value.nbytes:
            return False
        value.store, value.timing = store, _AT_ONCE
        self.outbox.add(value)
        self.outbox.finish(value)
        return value.tensor is None

    def land(self, nbytes: int, beside: Set[Value]) -> None:
        """Evict others."""
        before, self._in_use = self._in_use, self._in_use | beside
        try:
            self.make_room(nbytes)
        finally:
            self._in_use = before

    def landed(self, tensor: torch.Tensor) -> None:
        """Count it until it dies."""
        if self.awake:
            self.meter.made(tensor.untyped_storage())

    def _impossible(self, nbytes: int, in_pieces: int = 0) -> BudgetError:
        """Say that an operator that makes ``nbytes`` cannot run; ``in_pieces`` are free, but not in a row."""
        level = self.meter.level()
        need = level + nbytes + in_pieces
        there = lines_of(self.standing())
        pieces = f", and {format_bytes(in_pieces)} in pieces that are too small" if in_pieces else ""
        outlook = self.outlook(need)
        advice = f"Give a larger budget ({need} bytes get past this operator)"
        if outlook is not None:
            advice = f"{outlook.source} {format_bytes(outlook.nbytes)} ({outlook.nbytes} bytes). Give at least that"
        return BudgetError(
            f"need {format_bytes(need)} here ({format_bytes(nbytes)} more than the {format_bytes(level)} in use"
            f"{pieces}), have a budget of {format_bytes(self.budget or 0)}, and nothing is left that could be dropped "
            "and had again. "
            f"{advice}, or make the step smaller: the batch, the inputs, a loss in chunks. There are:\n{there}",
            smallest=need if outlook is None else outlook.nbytes,
        )


def _unknown(need: int) -> Outlook | None:
    return None


def _would_be_free(value: Value) -> bool:
    """Tell whether a value's storage dies when the session lets go of it."""
    tensor = value.tensor
    if tensor is None:
        return False
    held = 1 if value.witness is tensor else 1 + _same_storage(tensor, value)
    return users(tensor.untyped_storage()._cdata) <= held


def _same_storage(tensor: torch.Tensor, value: Value) -> bool:
    witness = value.witness
    return witness is not None and witness.untyped_storage()._cdata == tensor.untyped_storage()._cdata
