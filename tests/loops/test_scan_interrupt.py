"""Ctrl-C in a loop leaves nothing behind: no bytes in memory or in stores, no files, no modes, no other generators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, random, signal, sys, threading, time
from pathlib import Path
import torch, torch._dynamo  # imported late otherwise, when an interrupt would leave it half imported
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
import scrimp
from scrimp.testing import live_bytes

folder, until = Path(sys.argv[1]), (lambda _: False) if sys.argv[2] == "unknown" else None
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9), torch.nn.Dropout(0.3))
x, host, disk = torch.randn(4, 9), scrimp.store.Host("1kB"), scrimp.store.Disk(folder)

def step(h, _):
    return (model(h) + torch.rand(h.shape, generator=generator)).sin(), None

def loop():
    return scrimp.scan(step, x, length=60, slots=2, host=host, disk=disk, until=until)[0]

def now():
    return [torch.get_rng_state().tolist(), generator.get_state().tolist(), model[1].running_mean.tolist()]

def seconds(forward):
    start = time.perf_counter()
    h = loop()
    if forward:
        return time.perf_counter() - start
    start = time.perf_counter()
    h.sum().backward()
    return time.perf_counter() - start

def attempt(forward, delay):
    interrupted, h, before = False, None, None
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with live_bytes() as count:
        try:
            if forward:
                timer.start()
            h = loop()
            before = now()
            if not forward:
                timer.start()
                h.sum().backward()
            time.sleep(2)
        except KeyboardInterrupt:
            interrupted = True
        timer.join()
        assert before is None or forward or now() == before
        model.zero_grad()
        h = None
    # Counting can be interrupted as well: what counts is which of the storages that it has seen are there.
    left = [storage for watch in count._live._watches.values() if (storage := watch()) is not None]
    assert not left, sum(storage.nbytes() for storage in left)
    assert host.statistics.held.bytes == disk.statistics.held.bytes == 0
    assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()
    assert torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return interrupted

seconds(True), seconds(False)
draws, arrived = random.Random(0), []
for forward in (True, False):
    most = seconds(forward)
    for _ in range(15):
        model.zero_grad()
        arrived.append(attempt(forward, draws.uniform(0.1, 0.9) * most))
# Python loses what is raised in a destructor, and with it an interrupt now and then.
assert sum(arrived) > len(arrived) / 2, arrived
time.sleep(0.2)
assert not [path for path in folder.rglob("*.bytes")]
print("nothing left")
"""


@pytest.mark.slow
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_interrupts_at_any_moment_leave_nothing_behind(length: str, tmp_path: Path) -> None:
    """In forward and in backward, in a step or while a state goes into a store."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), length]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing left" in done.stdout
    assert not list(tmp_path.rglob("*.bytes"))


def test_an_interrupt_waits_for_the_loops_own_code_only() -> None:
    """It gets through at once in a function of the user's, and otherwise at the end, to the handler that was there."""
    program = """
import signal
from scrimp._loops.patience import Patience
for users in (True, False):
    reached = False
    try:
        with Patience() as patience:
            (patience.call if users else lambda function, *args: function(*args))(signal.raise_signal, signal.SIGINT)
            reached = True
    except KeyboardInterrupt:
        assert reached is not users
    else:
        raise AssertionError("no interrupt")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
