"""The threads that run branches: what they see, and how they end."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

import scrimp
from scrimp._engine.garbage import COLLECTS_ANYWHERE


def test_workers_see_the_callers_surroundings() -> None:
    """Grad mode, inference mode, autocast, context variables and the number of threads are the caller's."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    barrier = threading.Barrier(2, timeout=20)

    def look(x: Tensor) -> tuple[Any, ...]:
        barrier.wait()
        return (
            variable.get(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch._C._is_fwd_grad_enabled(),
            (x @ x).dtype,
        )

    before = torch.get_num_threads()
    variable.set("here")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), _set_fwd_grad_enabled(False):
        seen = scrimp.parallel([look, look], torch.ones(2, 2), workers=2, threads_per_worker=1)
    assert seen[0] == seen[1] == ("here", True, torch.bfloat16, True, 1, False, torch.bfloat16)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_branch_raises_in_a_thread_surfaces(kind: type[BaseException]) -> None:
    """Also what is no ``Exception``."""
    barrier = threading.Barrier(2, timeout=20)

    def branch(x: Tensor) -> Tensor:
        barrier.wait()
        if threading.current_thread() is not threading.main_thread():
            raise kind
        return x

    with pytest.raises(kind):
        scrimp.parallel([branch, branch], torch.ones(1), workers=2)


def test_a_worker_that_cannot_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong before the first task surfaces too, and no thread stays."""
    threads = threading.active_count()
    before = torch.set_num_threads

    def fail(number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no threads left")
        before(number)

    monkeypatch.setattr(torch, "set_num_threads", fail)
    with pytest.raises(OSError, match="no threads left"):
        scrimp.parallel([lambda x: time.sleep(0.02) or x] * 4, torch.ones(1), workers=2)
    assert threading.active_count() == threads


def test_an_interrupt_ends_every_thread() -> None:
    """Ctrl-C while branches run raises ``KeyboardInterrupt`` once the threads have ended."""
    threads = threading.active_count()
    main = threading.main_thread()

    def branch(x: Tensor) -> Tensor:
        if threading.current_thread() is not main:
            signal.raise_signal(signal.SIGINT)
        else:
            time.sleep(0.05)
        return x

    with pytest.raises(KeyboardInterrupt):
        scrimp.parallel([branch] * 6, torch.ones(1), workers=2)
    assert threading.active_count() == threads


# Two branches ask for the generator's state, as checkpoints do, while every third object made means a collection that
# hands the interpreter to the other one.
_COLLECTS = """
import faulthandler, gc, threading, time, torch, scrimp
faulthandler.dump_traceback_later(60, exit=True)
both = threading.Barrier(2)
def branch(x):
    both.wait()
    kept = [torch.get_rng_state() for _ in range(100)]
    return x
gc.callbacks.append(lambda phase, info: time.sleep(0.001))
gc.set_threshold(3)
scrimp.parallel([branch] * 2, torch.ones(2), workers=2)
assert gc.isenabled()
"""


@pytest.mark.slow
def test_a_collection_of_garbage_does_not_stop_the_branches() -> None:
    """Where the generator's lock is held during a collection, as in Python before 3.12, none takes place."""
    subprocess.run([sys.executable, "-c", _COLLECTS], check=True, timeout=120)


def test_collections_are_as_before_once_all_branches_have_ended() -> None:
    """Also after an error, with branches inside of branches, and where they were off."""

    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError

    def nested(x: Tensor) -> Tensor:
        with pytest.raises(ArithmeticError):
            scrimp.parallel([fail] * 2, x, workers=2)
        seen.append(gc.isenabled())
        return x

    seen: list[bool] = []
    scrimp.parallel([nested] * 2, torch.ones(1), workers=2)
    assert seen == [not COLLECTS_ANYWHERE] * 2
    assert gc.isenabled()
    gc.disable()
    try:
        scrimp.parallel([torch.sin] * 2, torch.ones(1), workers=2)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_branches_run_leaves_collections_on() -> None:
    """In the new process no branch is left to wait for."""
    answers: list[int] = []

    def branch(x: Tensor) -> Tensor:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        answers.append(os.waitpid(child, 0)[1])
        return x

    scrimp.parallel([branch, torch.sin], torch.ones(1), workers=2)
    assert answers == [0]


def test_ctrl_c_while_a_thread_starts_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` is run to its end, or the new thread could wait for ever; then the interrupt surfaces."""
    whole: list[bool] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGINT)
        start(thread)
        whole.append(True)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        scrimp.parallel([torch.sin, torch.cos], torch.ones(1), workers=2)
    assert whole == [True]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_does_not_end_the_waiting() -> None:
    """The threads have ended when the interrupt surfaces, although it came again."""
    ended: list[bool] = []

    def branch(x: Tensor) -> Tensor:
        if threading.current_thread() is threading.main_thread():
            begun.wait()
            signal.raise_signal(signal.SIGINT)
        begun.set()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.append(True)
        return x

    begun = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        scrimp.parallel([branch] * 2, torch.ones(1), workers=2)
    assert ended == [True]
