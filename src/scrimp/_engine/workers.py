"""Running tasks in threads that see the world as the calling thread does."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The thread-local settings of PyTorch that decide what an operator does."""

    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]
    autocast_cache: bool
    intra_op_threads: int

    @classmethod
    def here(cls, intra_op_threads: int) -> Surroundings:
        """Those of the calling thread, with another number of threads inside operators."""
        autocast = tuple(
            _Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        )
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=autocast,
            autocast_cache=torch.is_autocast_cache_enabled(),
            intra_op_threads=intra_op_threads,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make them those of this thread, which is a worker's and dies with its tasks."""
        torch.set_num_threads(self.intra_op_threads)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for autocast in self.autocast:
                stack.enter_context(
                    torch.autocast(
                        autocast.device,
                        enabled=autocast.enabled,
                        dtype=autocast.dtype,
                        cache_enabled=self.autocast_cache,
                    )
                )
            yield


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Let operators called from this thread use ``number`` threads while the context is open."""
    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_tasks(tasks: Sequence[Callable[[], T]], workers: int, threads: int) -> list[T]:
    """Run every task once, in up to ``workers`` threads, the calling one among them; results in sequence.

    Tasks are begun in sequence. After an error none is begun; those that run end; then the error of the first
    task that has one is raised. All threads have ended when this returns or raises, Ctrl-C included.
    """
    crew = _Crew(tasks)
    surroundings = Surroundings.here(threads)
    others = [
        threading.Thread(target=crew.work_as, args=(surroundings,), name=f"scrimp-branch-{index}")
        for index in range(1, min(workers, len(tasks)))
    ]
    started: list[threading.Thread] = []
    with intra_op_threads(threads):
        try:
            for thread in others:
                thread.start()
                started.append(thread)
            crew.work()
        except BaseException:
            crew.stopped.set()
            raise
        finally:
            crew.wait_for(started)
    crew.raise_first_error()
    return [crew.results[index] for index in range(len(tasks))]


class _Crew:
    """The tasks, and what became of them."""

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        # A context cannot be entered by two threads at once: a copy for each task.
        self._tasks = [(contextvars.copy_context(), task) for task in tasks]
        self._next = itertools.count()
        self.stopped = threading.Event()
        self.results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        """Take tasks until none is left."""
        while not self.stopped.is_set() and (index := next(self._next)) < len(self._tasks):
            context, task = self._tasks[index]
            try:
                self.results[index] = context.run(task)
            except Exception as error:
                self._errors[index] = error
                self.stopped.set()

    def work_as(self, surroundings: Surroundings) -> None:
        """The same, in a thread of its own."""
        with surroundings.applied():
            self.work()

    def wait_for(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until all have ended; an interrupt ends the waiting only after that."""
        interrupt: KeyboardInterrupt | None = None
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as error:
                    self.stopped.set()
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def raise_first_error(self) -> None:
        """Tasks are begun in sequence, so which error is the first does not depend on timing."""
        if self._errors:
            raise self._errors[min(self._errors)]
