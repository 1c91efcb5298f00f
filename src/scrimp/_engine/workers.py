"""Running tasks in threads that see the world as the calling thread does."""

from __future__ import annotations

import contextvars
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.overrides import _len_torch_function_stack  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

T = TypeVar("T")
Workers: TypeAlias = int | Literal["auto"]

_AUTOCAST_DEVICES = ("cpu", "cuda")


def crew_of(workers: Workers, threads: int) -> int:
    """How many workers that is: for ``"auto"`` as many as there are cores for, with ``threads`` each."""
    if workers == "auto":
        return max(1, cores() // threads)
    if isinstance(workers, int) and workers >= 1:
        return workers
    raise ValueError(
        f'workers needs to be "auto" or a number of threads from one on, and is {workers!r}. Next: pass one of these.'
    )


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_be_threaded() -> bool:
    """Whether nothing is in force that follows one thread's operators, in sequence."""
    return not (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or torch.is_anomaly_enabled()
        # Inference mode switches this off as well, and there it says nothing: there is no backward.
        or not (torch._C._is_multithreading_enabled() or torch.is_inference_mode_enabled())
    )


@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The thread-local settings of PyTorch that decide what an operator does."""

    grad: bool
    forward_grad: bool
    inference: bool
    stream: torch.cuda.Stream | None
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
            forward_grad=torch._C._is_fwd_grad_enabled(),
            # The current stream of the current device says which device that is, too.
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
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
            stack.enter_context(_set_fwd_grad_enabled(self.forward_grad))
            stack.enter_context(torch.cuda.stream(self.stream))
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
    with intra_op_threads(threads):
        try:
            for thread in others:
                thread.start()
            crew.work()
        except BaseException:
            crew.stopped.set()
            raise
        finally:
            crew.wait_for(others)
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

    def work(self, caught: type[BaseException] = Exception) -> None:
        """Take tasks until none is left; errors of the kind ``caught`` are kept for the end."""
        while not self.stopped.is_set() and (index := next(self._next)) < len(self._tasks):
            context, task = self._tasks[index]
            try:
                self.results[index] = context.run(task)
            except caught as error:
                self._errors[index] = error
                self.stopped.set()

    def work_as(self, surroundings: Surroundings) -> None:
        """The same, in a thread of its own, where nobody else would see what is raised."""
        try:
            with surroundings.applied():
                self.work(BaseException)
        except BaseException as error:
            self._errors[len(self._tasks)] = error
            self.stopped.set()

    def wait_for(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until all that were started have ended; an interrupt ends the waiting only after that."""
        interrupt: KeyboardInterrupt | None = None
        for thread in threads:
            # An interrupt may have come before this one was started, or while it was: then it has no task to do.
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt as error:
                    self.stopped.set()
                    interrupt = error
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # or its traceback, and this frame, would keep each other and all that ran alive

    def raise_first_error(self) -> None:
        """Tasks are begun in sequence, so which error is the first does not depend on timing."""
        errors, self._errors = self._errors, {}
        try:
            if errors:
                raise errors[min(errors)]
        finally:
            errors.clear()  # as above
