"""Passes of several threads over one model: what is hooked for one pass is not called from another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

import scrimp
from scrimp._engine.split import Split


def elsewhere(run: Callable[[], object]) -> None:
    """Run something in another thread, to its end; its error is raised here."""
    errors: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Meanwhile(scrimp.Observer):
    """Runs another thread's pass before each node of this one; notes all nodes that it is told of."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run
        self.thread = threading.get_ident()
        self.names: list[str] = []

    def before(self, node: Node) -> None:
        """Note the node, then let the other thread work."""
        self.names.append(node.name())
        if threading.get_ident() == self.thread:
            elsewhere(self.run)


def test_an_observer_sees_its_own_pass_only() -> None:
    """The other pass accumulates into the same leaves; its nodes are neither counted nor stopped."""
    w = torch.ones(3, requires_grad=True)
    observer, profile = Meanwhile(lambda: (w * 3).sum().backward()), scrimp.Profile()
    scrimp.backward((w * 2).sum(), observer=[profile, observer])
    assert observer.names == ["SumBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]
    assert [run.name for run in profile.runs] == observer.names
    assert torch.equal(w.grad, torch.full((3,), 2.0 + 3 * 3.0))


def test_a_cancellation_stops_its_own_pass_only() -> None:
    """The other thread's pass over the same graph ends with all its gradients."""
    w = torch.ones(3, requires_grad=True)
    loss = (w * 2).sum()
    cancellation = scrimp.Cancellation()
    cancellation.cancel()
    observer = Meanwhile(lambda: loss.backward(retain_graph=True))
    with pytest.raises(scrimp.errors.BackwardCancelledError):
        scrimp.backward(loss, retain_graph=True, observer=[observer, cancellation])
    assert torch.equal(w.grad, torch.full((3,), 2.0))


def test_leaves_are_reported_for_their_own_pass_only() -> None:
    """Gradients that another thread adds to the same leaves before and after the report are its own."""
    w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def other() -> None:
        (w * v).sum().backward()

    seen: list[Tensor] = []

    def report(leaf: Tensor, gradient: Tensor) -> None:
        seen.append(leaf)
        elsewhere(other)

    loss = (w.sin() * v).sum()
    loss.register_hook(lambda _: elsewhere(other))
    scrimp.backward(loss, on_leaf_grad_ready=report)
    assert [leaf is v for leaf in seen] == [True, False]


def test_the_end_of_a_branch_ends_no_other_pass(cuts: list[Split]) -> None:
    """While branches run in threads, another thread's pass over the same modules gets all of its gradients."""
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    x = torch.randn(2, 4)
    one = torch.autograd.grad(loss_of(modules, x), list(modules.parameters()))
    scrimp.backward(loss_of(modules, x), workers=2)
    modules.zero_grad()
    ran: list[bool] = []
    loss = loss_of(modules, x, lambda _: ran.append(True) or elsewhere(lambda: loss_of(modules, x).backward()))
    scrimp.backward(loss, workers=2)
    assert len(ran) == len(modules)
    assert len(cuts) == 1
    for parameter, gradient in zip(modules.parameters(), one, strict=True):
        torch.testing.assert_close(parameter.grad, 4 * gradient)


def loss_of(modules: nn.ModuleList, x: Tensor, hook: Any = None) -> Tensor:
    """The sum over all modules; ``hook`` is called in the backward of each."""
    results = [module(x) for module in modules]
    for result in results if hook else ():
        result.register_hook(hook)
    return sum(result.square().mean() for result in results)
