"""Ctrl-C, as a terminal sends it: a signal from outside, while a pass runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

# Each way prints "running" when its pass is under way, and would go on for minutes if nothing stopped it.
_BEFORE = """
import os, threading, time, torch, scrimp
from torch import nn

torch.set_num_threads(1)
NODES = 2000


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        running()
        time.sleep(0.05)
        return gradient


def slowly(x):
    for _ in range(NODES):
        x = Slow.apply(x)
    return x


def heavy(x, weight):
    for _ in range(40):
        x = x @ weight
    return x


def running(*_):
    os.write(1, b"running\\n")  # in one piece, whatever other threads write


leaf = torch.ones(3, requires_grad=True)
threads = threading.active_count()
"""

_WAYS = {
    "plain": "scrimp.backward(slowly(leaf).sum())",
    "observed, without Python in its nodes": """
        matrix = torch.eye(200)
        y = torch.ones(200, 200, requires_grad=True)
        for _ in range(4000):
            y = y @ matrix
        y.register_hook(running)
        scrimp.backward(y.sum(), observer=scrimp.Observer())
    """,
    "branches, forward": """
        def branch(x):
            running()
            time.sleep(0.05)
            return x * 1

        scrimp.parallel([branch] * 2000, leaf, workers=2)
    """,
    "branches, backward": """
        results = scrimp.parallel([lambda x: Slow.apply(x)] * 2000, leaf, workers=2)
        scrimp.backward(sum(results).sum())
    """,
    "workers": """
        modules = [nn.Linear(200, 200) for _ in range(30)]
        x = torch.ones(200, 200)
        loss = lambda: sum(heavy(m(x), torch.eye(200)).sum() for m in modules)
        scrimp.backward(loss(), workers=2)
        from scrimp._engine import threaded
        ran = []
        run_part = threaded._Parts._run_part
        threaded._Parts._run_part = lambda self, part: (ran.append(part), running(0), run_part(self, part))
        scrimp.backward(loss(), workers=2)
        assert not ran, "this pass ran to its end"
    """,
}

_AFTER = """
except KeyboardInterrupt:
    assert threading.active_count() == threads, threading.enumerate()
    assert torch._C._current_graph_task_id() == -1
    clean = torch.ones(3, requires_grad=True)
    scrimp.backward((clean * 2).sum(), workers=2)
    assert clean.grad.tolist() == [2.0, 2.0, 2.0]
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(_WAYS))
def test_ctrl_c_ends_the_pass_and_leaves_nothing(way: str) -> None:
    """``KeyboardInterrupt`` surfaces, no thread stays, and the next pass is right."""
    code = _BEFORE + "try:\n" + textwrap.indent(textwrap.dedent(_WAYS[way]).strip(), "    ") + _AFTER
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said.splitlines()[-1:] == ["interrupted"], errors
    assert process.returncode == 0
