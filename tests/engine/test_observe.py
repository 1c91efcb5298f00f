"""What observers see of a backward pass, and how they stop it."""

from __future__ import annotations

import gc
import io
import json
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import Node

import scrimp


def chain(length: int) -> tuple[Tensor, Tensor]:
    """A leaf and the sum of its repeated sines."""
    x = torch.ones(100, requires_grad=True)
    y = x
    for _ in range(length):
        y = y.sin()
    return x, y.sum()


def test_profile_counts_every_node() -> None:
    """Each node that ran is there once, with a time and the bytes of the gradients that it made."""
    _, loss = chain(5)
    profile = scrimp.Profile()
    scrimp.backward(loss, observer=profile)
    totals = {total.name: total for total in profile.totals()}
    assert totals["SinBackward0"].count == 5
    assert totals["SinBackward0"].bytes == 5 * 400
    assert {run.name for run in profile.runs} == {
        "SumBackward0",
        "SinBackward0",
        "torch::autograd::AccumulateGrad",
    }
    assert all(run.seconds > 0 for run in profile.runs)


def test_profile_counts_a_storage_that_is_handed_on_as_nothing() -> None:
    """A node that only passes its gradient on has made no bytes."""
    x, y = torch.ones(10, requires_grad=True), torch.ones(10, requires_grad=True)
    profile = scrimp.Profile()
    scrimp.backward(x + y, torch.ones(10), observer=profile)
    assert {run.name: run.bytes for run in profile.runs}["AddBackward0"] == 0


def test_profile_measures_sparse_gradients() -> None:
    """The sparse gradient of an embedding counts by its values."""
    weight = torch.ones(10, 4, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True)
    profile = scrimp.Profile()
    scrimp.backward(rows.sum(), observer=profile)
    assert {run.name: run.bytes for run in profile.runs}["EmbeddingBackward0"] == 2 * 4 * 4


def test_chrome_trace_is_written_whole(tmp_path: Path) -> None:
    """The file is JSON of complete events that nest in time, and no part file stays."""
    _, loss = chain(3)
    profile = scrimp.Profile()
    scrimp.backward(loss, observer=profile)
    path = tmp_path / "trace.json"
    profile.write_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("SinBackward0") == 3
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_a_failed_write_leaves_the_old_trace(tmp_path: Path) -> None:
    """What cannot be written as JSON changes no file."""
    path = tmp_path / "trace.json"
    path.write_text("old")
    profile = scrimp.Profile()
    profile.runs.append(scrimp.NodeRun("name", 0.0, 0.0, object(), 0))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        profile.write_chrome_trace(path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_profile_prints_as_a_table() -> None:
    """Rich shows one line for each name."""
    _, loss = chain(3)
    profile = scrimp.Profile()
    scrimp.backward(loss, observer=profile)
    console = Console(file=io.StringIO(), width=100)
    console.print(profile)
    assert "SinBackward0" in console.file.getvalue()  # type: ignore[attr-defined]


def test_progress_bar_ends_full() -> None:
    """The last picture counts every node, and Rich's thread is gone."""
    threads = threading.active_count()
    _, loss = chain(30)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    scrimp.backward(loss, observer=scrimp.ProgressBar(console))
    assert "32/32" in console.file.getvalue()  # type: ignore[attr-defined]
    assert threading.active_count() == threads


class At(scrimp.Observer):
    """Calls a function before the given node."""

    def __init__(self, number: int, function: Any) -> None:
        self.number, self.function = number, function

    def before(self, node: Node) -> None:
        """Count down."""
        self.number -= 1
        if self.number == 0:
            self.function()


def test_cancellation_says_what_was_done() -> None:
    """The error counts the nodes and names the leaves that are complete; the others have no gradient."""
    early, late = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (early.sin().sin() * late).sum()
    cancellation = scrimp.Cancellation()
    with pytest.raises(scrimp.errors.BackwardCancelledError) as caught:
        scrimp.backward(loss, observer=[At(4, cancellation.cancel), cancellation])
    assert caught.value.nodes_done == 3
    assert [leaf is late for leaf in caught.value.leaves_done] == [True]
    assert torch.equal(late.grad, early.sin().sin())
    assert early.grad is None


def test_a_cancelled_pass_over_a_retained_graph_can_be_run_again() -> None:
    """With ``retain_graph=True`` the graph is as it was."""
    x, loss = chain(10)
    cancellation = scrimp.Cancellation()
    with pytest.raises(scrimp.errors.BackwardCancelledError):
        scrimp.backward(loss, retain_graph=True, observer=[At(5, cancellation.cancel), cancellation])
    assert x.grad is None
    scrimp.backward(loss)
    assert x.grad is not None


def test_an_interrupt_stops_between_nodes() -> None:
    """Ctrl-C during an observed pass raises ``KeyboardInterrupt`` before the next node; no hook stays."""
    x, loss = chain(50)
    profile = scrimp.Profile()
    interrupt = At(10, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        scrimp.backward(loss, retain_graph=True, observer=[profile, interrupt])
    assert len(profile.runs) == 9
    loss.backward()
    assert len(profile.runs) == 9
    assert x.grad is not None


def test_an_observer_that_cannot_begin_leaves_no_hook() -> None:
    """An error in ``begin`` ends those that had begun and surfaces."""

    class Broken(scrimp.Observer):
        def begin(self, total: int) -> None:
            raise OSError("no terminal")

    _, loss = chain(3)
    profile = scrimp.Profile()
    with pytest.raises(OSError, match="no terminal"):
        scrimp.backward(loss, retain_graph=True, observer=[profile, Broken()])
    loss.backward()
    assert profile.runs == []


def test_the_graph_dies_after_an_observed_pass() -> None:
    """Nothing of ours keeps nodes alive."""

    class Marker:
        pass

    x, loss = chain(3)
    marker = Marker()
    loss.grad_fn.metadata["marker"] = marker
    dead = weakref.ref(marker)
    profile = scrimp.Profile()
    scrimp.backward(loss, observer=profile, order="depth-first", on_leaf_grad_ready=lambda leaf, gradient: None)
    del loss, marker
    gc.collect()
    assert dead() is None
    assert x.grad is not None


def test_a_pass_that_a_hook_runs_first_is_not_observed() -> None:
    """It runs the leaf's node before any of the observed pass has run."""
    w = torch.ones(3, requires_grad=True)
    other, loss = (w * 3).sum(), (w * 2).sum()
    loss.register_hook(lambda _: other.backward())
    profile = scrimp.Profile()
    scrimp.backward(loss, observer=profile)
    assert [run.name for run in profile.runs] == ["SumBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]
