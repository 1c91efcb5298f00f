"""When threads pay: what branches of one shape took one by one, and what they took in threads."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Starting and joining a thread, and the joining node: measured by benchmarks/backward.py on a 2-core
# x86-64 CPU.
_SECONDS_PER_THREAD = 150e-6
# Threads share caches and memory bandwidth, so a small predicted gain is none.
_LEAST_GAIN = 1.1
_REMEMBERED = 256


def predicted_seconds(tasks: Sequence[float], workers: int) -> float:
    """How long ``workers`` threads will take: tasks are begun in sequence, each by whoever is free first."""
    free = [0.0] * workers
    for task in tasks:
        first = free.index(min(free))
        free[first] += task
    return max(free) + _SECONDS_PER_THREAD * (workers - 1)


class Trial:
    """What is known about one shape: measured one by one first, in threads next if that promises a gain."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._serial: list[float] | None = None
        self._in_threads: float | None = None

    @property
    def is_new(self) -> bool:
        """Whether nothing was run yet."""
        return self._serial is None

    @property
    def threaded(self) -> bool:
        """Whether the next run should use threads."""
        if self._serial is None:
            return False
        if self._in_threads is None:
            return predicted_seconds(self._serial, self._workers) * _LEAST_GAIN < sum(self._serial)
        return self._in_threads < sum(self._serial)

    def timed_one_by_one(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the tasks in this thread; remember what each took, at best."""
        results, seconds = [], []
        for task in tasks:
            start = time.perf_counter()
            results.append(task())
            seconds.append(time.perf_counter() - start)
        before = self._serial or seconds
        self._serial = [min(pair) for pair in zip(before, seconds, strict=True)]
        return results

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Remember what the threaded run inside took, at best."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._in_threads = min(seconds, self._in_threads or seconds)


class Costs:
    """A bounded memory of trials, by shape. Losing one costs a measurement, never a result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: OrderedDict[Hashable, Trial] = OrderedDict()

    def trial(self, key: Hashable, workers: int) -> Trial:
        """The trial of this shape, begun if it is new."""
        with self._lock:
            trial = self._trials.setdefault((key, workers), Trial(workers))
            self._trials.move_to_end((key, workers))
            if len(self._trials) > _REMEMBERED:
                self._trials.popitem(last=False)
            return trial


def shape_key(branches: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], threads: int) -> Hashable:
    """Equal for calls that should cost the same."""
    shapes = tuple(
        (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else type(value)
        for value in tree_leaves(inputs)
    )
    return tuple(_identity(branch) for branch in branches), shapes, threads, torch.is_grad_enabled()


def _identity(branch: Callable[..., Any]) -> Hashable:
    """A function by its code, which outlives a lambda made anew in every step; others as they are."""
    return getattr(branch, "__code__", None) or id(branch)
