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

from scrimp._engine.garbage import no_collections
from scrimp._engine.interrupted import interrupts_later

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
    crew = _Crew(tasks, Surroundings.here(threads))
    with intra_op_threads(threads), no_collections():
        crew.run(min(workers, len(tasks)) - 1)
    crew.raise_first_error()
    return [crew.results[index] for index in range(len(tasks))]


class _Crew:
    """The tasks, the threads that run them beside the calling one, and what became of the tasks.

    Ctrl-C may come between any two lines in the calling thread. So nothing here is guarded by locks of
    :mod:`threading` (an interrupted ``Event.set`` can leave its lock taken for ever), and ``Thread.join`` is not relied
    on: interrupted, it takes a thread that runs for one that has ended (Python 3.11).
    """

    def __init__(self, tasks: Sequence[Callable[[], Any]], surroundings: Surroundings) -> None:
        # A context cannot be entered by two threads at once: a copy for each task.
        self._tasks = [(contextvars.copy_context(), task) for task in tasks]
        self._surroundings = surroundings
        self._next = itertools.count()
        self._stopped = False
        self._helpers: list[_Helper] = []
        self._errors: dict[int, BaseException] = {}
        self.results: dict[int, Any] = {}

    def run(self, helpers: int) -> None:
        """Run the tasks, beside so many other threads; whatever is raised here is raised when these have ended."""
        failure: BaseException | None = None
        waiting = True
        try:
            while waiting:
                try:  # the only one, for all: between two, an interrupt would leave threads behind
                    if failure is None:
                        self._start(helpers)
                        self._work()
                    for helper in self._helpers:
                        helper.wait()
                    waiting = False
                except BaseException as error:
                    self._stopped = True
                    failure = error
            if failure is not None:
                raise failure
        finally:
            # Or these and this object, the error and this frame, would keep each other and all that ran alive.
            self._helpers.clear()
            del failure

    def _start(self, helpers: int) -> None:
        for index in range(1, helpers + 1):
            helper = _Helper(self._work_beside, f"scrimp-branch-{index}")
            self._helpers.append(helper)
            helper.start()

    def _work(self, caught: type[BaseException] = Exception) -> None:
        """Take tasks until none is left; errors of the kind ``caught`` are kept for the end."""
        while not self._stopped and (index := next(self._next)) < len(self._tasks):
            context, task = self._tasks[index]
            try:
                self.results[index] = context.run(task)
            except caught as error:
                self._errors[index] = error
                self._stopped = True

    def _work_beside(self) -> None:
        """The same, in a thread of its own, where nobody else would see what is raised."""
        if self._stopped:
            return
        try:
            with self._surroundings.applied():
                self._work(BaseException)
        except BaseException as error:
            self._errors[len(self._tasks)] = error
            self._stopped = True

    def raise_first_error(self) -> None:
        """Tasks are begun in sequence, so which error is the first does not depend on timing."""
        errors, self._errors = self._errors, {}
        try:
            if errors:
                raise errors[min(errors)]
        finally:
            errors.clear()  # as above


class _Helper:
    """A thread that can be waited for again when the waiting was interrupted."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._run = run
        self._at_work = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name)

    def start(self) -> None:
        """Begin. An interrupt within ``Thread.start`` can leave the new thread waiting for ever: it comes after it."""
        with interrupts_later():
            self._thread.start()

    def wait(self) -> None:
        """Wait until it has ended, if it runs."""
        with self._at_work:  # a thread that is not here yet will find no task to do
            pass
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        with self._at_work:
            self._run()
