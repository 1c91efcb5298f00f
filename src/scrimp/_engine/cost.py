"""When threads pay: what branches of one shape took one by one, and what they took in threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from statistics import median
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Starting and joining a thread, and the joining node: measured by benchmarks/backward.py on a 2-core
# x86-64 CPU.
_SECONDS_PER_THREAD = 150e-6
# Threads share caches and memory bandwidth, so a small predicted gain is none.
_LEAST_GAIN = 1.1
_REMEMBERED = 256

Entry = TypeVar("Entry")


def predicted_seconds(tasks: Sequence[float], workers: int) -> float:
    """How long ``workers`` threads will take: tasks are begun in sequence, each by whoever is free first."""
    free = [0.0] * workers
    for task in tasks:
        first = free.index(min(free))
        free[first] += task
    return max(free) + _SECONDS_PER_THREAD * (workers - 1)


class Contest:
    """Two ways to do the same thing. Each is tried twice; threads are used if they were clearly faster at best.

    They are given up for good as soon as they usually take longer than the other way did at best: what else the
    machine does may have decided the contest, or have changed.
    """

    _TRIES = 2
    _CLEARLY = 1.05
    _USUALLY = 5

    def __init__(self) -> None:
        self._tries = {False: 0, True: 0}
        self._best = {False: inf, True: inf}
        self._latest: deque[float] = deque(maxlen=self._USUALLY)
        self._given_up = False

    @property
    def knows_one_by_one(self) -> bool:
        """Whether enough runs without threads were measured."""
        return self._tries[False] >= self._TRIES

    @property
    def threaded(self) -> bool:
        """Whether the next run should use threads."""
        for way in (False, True):
            if self._tries[way] < self._TRIES:
                return way
        return not self._given_up and self._best[True] * self._CLEARLY < self._best[False]

    @contextmanager
    def timed(self, *, threaded: bool) -> Iterator[None]:
        """Remember what the run inside took; nothing, if it raises."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._tries[threaded] += 1
        self._best[threaded] = min(self._best[threaded], seconds)
        if threaded:
            self._latest.append(seconds)
            self._given_up |= len(self._latest) == self._USUALLY and median(self._latest) > self._best[False]


class Trial:
    """What is known of branches of one shape: measured one by one first, then in threads if that promises a gain."""

    def __init__(self) -> None:
        self._contest = Contest()
        self._tasks: list[float] | None = None
        self._serial_for_ever = False

    def threaded(self, workers: int) -> bool:
        """Whether the next run should use threads."""
        if self._tasks is None or self._serial_for_ever or not self._contest.threaded:
            return False
        return promises_gain(0.0, self._tasks, workers)

    def is_settled(self, workers: int) -> bool:
        """Whether these branches will run one after the other from now on, and nothing is left to be measured."""
        return self._serial_for_ever or (self._contest.knows_one_by_one and not self.threaded(workers))

    def stay_serial(self) -> None:
        """Never use threads: these branches must run one after the other."""
        self._serial_for_ever = True

    def timed_one_by_one(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the tasks in this thread; remember what each took, at best."""
        results, seconds = [], []
        with self._contest.timed(threaded=False):
            for task in tasks:
                start = time.perf_counter()
                results.append(task())
                seconds.append(time.perf_counter() - start)
        before = self._tasks or seconds
        self._tasks = [min(pair) for pair in zip(before, seconds, strict=True)]
        return results

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Remember what the threaded run inside took, at best."""
        with self._contest.timed(threaded=True):
            yield


def promises_gain(outside: float, tasks: Sequence[float], workers: int) -> bool:
    """Whether the model says that it is worth running ``tasks`` in threads, beside what takes ``outside`` anyway."""
    return (outside + predicted_seconds(tasks, workers)) * _LEAST_GAIN < outside + sum(tasks)


class Memory(Generic[Entry]):
    """A bounded memory, by shape. Losing an entry costs a measurement, never a result.

    It has no lock: a collection of garbage may run other passes in the midst of these lines, and a process may be
    forked there. Each line alone is atomic; what others do between two of them loses an entry at worst.
    """

    def __init__(self, kind: Callable[[], Entry]) -> None:
        self._kind = kind
        self._entries: dict[Hashable, Entry] = {}

    def entry(self, key: Hashable) -> Entry:
        """What is remembered of this shape, begun if it is new."""
        known = self._entries.pop(key, None)
        entry = self._entries.setdefault(key, self._kind() if known is None else known)
        if len(self._entries) > _REMEMBERED:
            for oldest in list(self._entries)[:-_REMEMBERED]:
                self._entries.pop(oldest, None)
        return entry


def shape_key(branches: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], threads: int) -> Hashable:
    """Equal for calls that should cost the same."""
    shapes = tuple(
        (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else type(value)
        for value in tree_leaves(inputs)
    )
    return tuple(_identity(branch) for branch in branches), shapes, threads, torch.is_grad_enabled()


def _identity(branch: Callable[..., Any]) -> Hashable:
    """A function by its code, which outlives a lambda made anew in every step; others as they are."""
    # Modules have no code, and take long to say so.
    return branch.__code__ if isinstance(branch, FunctionType | MethodType) else id(branch)
