"""``scrimp.backward(workers=...)``: branches of a plain graph in threads, and nobody can tell."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp._engine import threaded, workers
from scrimp._engine.diagnose import _is_freed
from scrimp._engine.split import Split

pytestmark = pytest.mark.usefixtures("cuts")


def assert_same_gradients(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    """The same gradients exist and have the same bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other)


def _nodes(loss: Tensor) -> list[Node]:
    found = dict.fromkeys([loss.grad_fn])
    waiting = [loss.grad_fn]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in found:
                found[following] = None
                waiting.append(following)
    return list(found)


def branches(count: int = 3, width: int = 8) -> tuple[nn.ModuleList, Callable[[], Tensor]]:
    """Modules over one input, and the loss of all."""
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])
    x = torch.randn(4, width)
    return modules, lambda: sum(module(x).square().mean() for module in modules)


def test_branches_run_at_the_same_time(cuts: list[Split], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of two branches can wait for each other."""
    best = threaded._best  # where to cut is judged by times, and on a busy machine a node may seem to take the longest
    monkeypatch.setattr(threaded, "_best", lambda found, costs, crew: best(found, [1e-3] * len(costs), crew))
    modules, loss = branches(2)
    scrimp.backward(loss(), workers=2)
    barrier = threading.Barrier(2, timeout=20)

    def meet(_: Tensor) -> None:
        barrier.wait()

    for module in modules:
        module[1].register_forward_hook(lambda module, args, result: result.register_hook(meet) and None)
    scrimp.backward(loss(), workers=2)
    assert len(cuts) == 1


def test_the_graph_is_freed_as_by_torch(cuts: list[Split]) -> None:
    """Every node lets go of what it saved, and another pass says so; a retained graph can be run again."""
    _, loss = branches()
    scrimp.backward(loss(), workers=2)
    ours = loss()
    scrimp.backward(ours, retain_graph=True, workers=2)
    scrimp.backward(ours, workers=2)
    theirs = loss()
    theirs.backward()
    freed = [(node.name(), _is_freed(node)) for node in _nodes(ours)]
    assert freed == [(node.name(), _is_freed(node)) for node in _nodes(theirs)]
    assert ("TanhBackward0", True) in freed
    with pytest.raises(scrimp.errors.GraphFreedError):
        scrimp.backward(ours, workers=2)
    assert len(cuts) == 3


def test_the_graph_dies_with_the_loss(cuts: list[Split]) -> None:
    """Neither the memory of shapes nor PyTorch's queues keep nodes of a graph that was run in threads."""

    class Marker:
        pass

    modules, _ = branches()
    trunk = nn.Linear(8, 8)

    def loss() -> Tensor:
        x = trunk(torch.ones(4, 8)).tanh()
        return sum(module(x).sum() for module in modules)

    scrimp.backward(loss(), workers=2)
    ours = loss()
    dead = []
    for node in _nodes(ours):
        if "variable" not in dir(node):
            node.metadata["marker"] = Marker()
            dead.append(weakref.ref(node.metadata["marker"]))
    scrimp.backward(ours, retain_graph=True, workers=2)
    del ours, node
    gc.collect()
    assert len(cuts) == 1
    assert [reference() for reference in dead] == [None] * len(dead)


def test_an_ended_pass_leaves_nothing_in_the_queue() -> None:
    """What was ready when a hook ended the pass is not kept alive by the engine's queue, in a thread that may end."""

    class Marker:
        pass

    def done(made: Any, received: Any) -> None:
        raise threaded._PartDone

    first, second = torch.ones(3, requires_grad=True).sin(), torch.ones(3, requires_grad=True).cos()
    loss = first.sum() + second.sum()
    assert first.grad_fn is not None
    first.grad_fn.metadata["marker"] = marker = Marker()
    dead = weakref.ref(marker)
    loss.grad_fn.next_functions[1][0].register_hook(done)
    threaded._until_done(loss.backward)
    del first, second, loss, marker
    gc.collect()
    assert dead() is None


def multi_grad(loss: Callable[[], Tensor], modules: nn.ModuleList, calls: list[int]) -> Tensor:
    """A loss whose hook counts on one pass over all."""
    inner: list[Tensor] = []
    handles = [m.register_forward_hook(lambda module, args, result: inner.append(result)) for m in modules]
    value = loss()
    register_multi_grad_hook(inner, lambda gradients: calls.append(len(gradients)))
    for handle in handles:
        handle.remove()
    return value


def test_a_pass_that_python_takes_part_in_stays_in_one_piece(cuts: list[Split]) -> None:
    """Hooks over several tensors, checkpoints and custom Functions are called as by PyTorch."""
    modules, loss = branches()
    calls: list[int] = []
    for _ in range(3):
        scrimp.backward(multi_grad(loss, modules, calls), workers=2)
    assert calls == [3, 3, 3]
    x = torch.randn(4, 8)
    for _ in range(3):
        scrimp.backward(sum(checkpoint(m, x, use_reentrant=False).sum() for m in modules), workers=2)
    assert cuts == []


@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        lambda: scrimp.session(policy=scrimp.policy.KeepNone()),
    ],
    ids=["save_on_cpu", "identity", "session"],
)
def test_saved_tensors_are_unpacked_by_one_thread(hooks: Any, cuts: list[Split]) -> None:
    """Also where graphs of the same shape, without such hooks, have been run in threads."""
    modules, loss = branches()
    for _ in range(2):
        scrimp.backward(loss(), workers=2)
    assert len(cuts) == 1
    modules.zero_grad()
    with hooks():
        packed = loss()
    scrimp.backward(packed, workers=2)
    assert len(cuts) == 1
    expected = torch.autograd.grad(loss(), list(modules.parameters()))
    assert_same_gradients([parameter.grad for parameter in modules.parameters()], list(expected))


@pytest.mark.parametrize(
    "options",
    [
        {"order": "depth-first"},
        {"create_graph": True},
        {"observer": scrimp.Profile()},
        {"on_leaf_grad_ready": lambda leaf, gradient: None},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_needs_the_whole_pass_has_it(options: dict[str, Any], cuts: list[Split]) -> None:
    """With another order, observers, reports or a graph of the pass there are no threads."""
    modules, loss = branches()
    for _ in range(3):
        scrimp.backward(loss(), workers=2, **options)
    modules.zero_grad()
    assert cuts == []


def test_a_leaf_that_two_branches_use_keeps_the_pass_whole(cuts: list[Split]) -> None:
    """Its gradients would arrive in several passes, and its hooks run in each."""
    w = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        scrimp.backward((w.sin() @ w).sum() + (w.cos() @ w).sum(), workers=2)
    assert cuts == []


def test_a_gradient_that_a_hook_takes_away_is_an_error(cuts: list[Split]) -> None:
    """The branch that needs it would run past its end: the pass stops instead."""
    _, loss = branches()
    scrimp.backward(loss(), workers=2)
    value = loss()
    for node in _nodes(value):
        if node.name() == "MeanBackward0":
            node.register_hook(lambda made, received: (None,))
    with pytest.raises(scrimp.errors.BackwardError, match="without workers"):
        scrimp.backward(value, workers=2)
    assert len(cuts) == 1


def test_an_error_while_learning_is_no_lesson(cuts: list[Split]) -> None:
    """The next pass learns."""
    _, loss = branches()
    faulty = loss()
    handle = faulty.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scrimp.backward(faulty, retain_graph=True, workers=2)
    handle.remove()
    scrimp.backward(faulty, workers=2)
    scrimp.backward(loss(), workers=2)
    assert len(cuts) == 1
    assert sys.getprofile() is None


def test_a_collection_of_garbage_is_no_python_of_the_pass(cuts: list[Split]) -> None:
    """What it calls while a pass is learned does not keep graphs of this shape whole."""
    _, loss = branches()
    phases: list[str] = []
    first, usual = loss(), gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        scrimp.backward(first, workers=2)
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(note)
    assert "stop" in phases
    scrimp.backward(loss(), workers=2)
    assert len(cuts) == 1


def test_a_pass_inside_a_branch_does_not_end_it(cuts: list[Split]) -> None:
    """A hook of the branch runs a pass of its own that accumulates into the branch's last leaf."""
    modules, loss = branches()
    scrimp.backward(loss(), workers=2)
    found = []
    for run in (partial(scrimp.backward, workers=2), Tensor.backward):
        modules.zero_grad()
        value = loss()
        for node in _nodes(value):
            if node.name() == "TanhBackward0":
                leaves = [after for after, _ in node.next_functions[0][0].next_functions if after is not None]
                node.register_prehook(lambda _, leaves=leaves: pass_of_its_own(leaves))
        run(value)
        found.append([parameter.grad for parameter in modules.parameters()])
    assert len(cuts) == 1
    assert_same_gradients(*found)


def pass_of_its_own(leaves: list[Node]) -> None:
    """Accumulate ones into some leaves, or into what lies before them."""
    edges = [GradientEdge(leaf, 0) for leaf in leaves]
    torch.autograd.backward(edges, [torch.ones(edge.node._input_metadata[0].shape) for edge in edges])


def test_short_branches_never_see_a_thread(monkeypatch: pytest.MonkeyPatch, cuts: list[Split]) -> None:
    """``"auto"`` leaves to PyTorch what takes microseconds."""
    monkeypatch.setattr(workers, "cores", lambda: 64)
    _, loss = branches()
    for _ in range(8):
        scrimp.backward(loss(), workers="auto")
    assert cuts == []


def test_auto_measures_both_ways(monkeypatch: pytest.MonkeyPatch, cuts: list[Split]) -> None:
    """Where the model promises a gain each way is tried twice, after the pass that measures the nodes."""
    monkeypatch.setattr(workers, "cores", lambda: 64)
    monkeypatch.setattr(threaded, "promises_gain", lambda outside, tasks, workers: True)
    _, loss = branches()
    for _ in range(5):
        scrimp.backward(loss(), workers="auto")
    assert len(cuts) == 2


def test_a_graph_that_looks_alike_is_not_cut_alike(cuts: list[Split]) -> None:
    """A shape that differs further down is learned anew, a few times, and then left alone."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)

    def loss(depth: int) -> Tensor:
        deep = [nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)]) for _ in range(2)]
        return sum(module(x).sum() for module in deep)

    for depth in (8, 9, 8, 9, 8, 9, 8, 9):
        scrimp.backward(loss(depth), workers=2)
    assert cuts == []
