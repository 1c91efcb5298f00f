"""What is left behind: after errors, interrupts, copies, and models that are forgotten."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import scrimp
from scrimp._limiter import Limiter
from scrimp.errors import BudgetError
from scrimp.testing import live_bytes

from .steps import assert_equal, blocks, gradients, measured, transformer


def test_after_a_step_that_did_not_fit_others_are_steps_of_their_own() -> None:
    """Even if the graph of the failed one is still there, and nobody detached its session."""
    model, other, batch = blocks(), blocks(), torch.randn(96, 48)
    peak = measured(lambda: other(batch).square().mean().backward(), other) + batch.nbytes
    plain = gradients(other)
    failing = scrimp.limit(model, int(peak * 0.35))
    loss = model(batch).square().mean()
    with pytest.raises(BudgetError):
        loss.backward()
    model.zero_grad()
    session = scrimp.limit(other, int(peak * 0.9))
    for _ in range(3):
        other(batch).square().mean().backward()
        assert_equal(gradients(other), plain)
    assert session.plan is not None
    for one in (session, failing):
        one.detach()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_after_a_replay_that_did_not_fit_nothing_is_limited(steps_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a recorded step, or one that left its plan, is of that step alone, even while somebody has it."""
    model, batch = blocks(), torch.randn(96, 48)
    peak = measured(lambda: model(batch).square().mean().backward(), model) + batch.nbytes
    gradients(model)
    session = scrimp.limit(model, int(peak * 0.7))
    for _ in range(steps_before):
        model(batch).square().mean().backward()
        gradients(model)
    if steps_before:
        model.append(nn.Tanh())  # this is not what was planned
    with monkeypatch.context() as patched:

        def no_room(*_: object) -> None:
            raise BudgetError("no room")

        patched.setattr(Limiter, "room_for", no_room)
        with pytest.raises(BudgetError) as caught:
            model(batch).square().mean().backward()
    larger = blocks(count=24)
    larger(torch.cat([batch] * 4)).square().mean().backward()
    assert caught.value.__traceback__ is not None
    session.detach()


def test_a_model_whose_backward_fails_goes_with_its_last_owner() -> None:
    """An error in the middle of a node of the first backward pass leaves no cycle through the graph behind."""

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch._C._current_graph_task_id() != -1 and func is torch.ops.aten.mm.default:
                raise ZeroDivisionError
            return func(*args, **(kwargs or {}))

    def fail() -> weakref.ref[nn.Module]:
        model, make_batch = transformer()
        session = scrimp.limit(model, "1GiB")
        loss = model(make_batch()).square().mean()
        with Failing(), pytest.raises(ZeroDivisionError):
            loss.backward()
        session.detach()
        return weakref.ref(model)

    model = fail()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("fails", [True, False])
def test_after_backward_no_other_model_is_held_on_to(fails: bool) -> None:
    """What a plain model saves after a limited step, one that failed in backward or not, goes with its graph."""
    model, make_batch = transformer()
    session = scrimp.limit(model, "1GiB")
    loss = model(make_batch()).square().mean()
    if fails:
        next(model.parameters()).register_hook(lambda _gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    del loss
    other, batch = transformer()[0], make_batch()
    standing = []
    for _ in range(3):
        with live_bytes() as count:
            other(batch).square().mean().backward()
        other.zero_grad()
        gc.collect()
        standing.append(count.now)
    session.detach()
    assert standing == [0, 0, 0]


def test_a_limited_model_that_is_forgotten_is_gone() -> None:
    """It does not wait for the garbage collector, and counts for others no more."""
    model = blocks()
    scrimp.limit(model, "1 GiB")
    ref = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()


def test_copies_of_a_limited_model_are_models_of_their_own() -> None:
    """By ``copy.deepcopy`` and through a file; they are not limited, and call themselves."""
    model, batch = blocks(), torch.randn(4, 48)
    session = scrimp.limit(model, "1 GiB")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other(batch), model(batch))
            for parameter in other.parameters():
                parameter.zero_()
            assert not torch.equal(other(batch), model(batch))
        scrimp.limit(other, "1 GiB").detach()
    session.detach()


def test_a_limited_model_that_is_interrupted_in_backward_goes_on() -> None:
    """A step that ends with ``KeyboardInterrupt`` leaves nothing on, and the next ones have the right bits."""
    model, batch = blocks(), torch.randn(96, 48)
    peak = measured(lambda: model(batch).square().mean().backward(), model) + batch.nbytes
    plain = gradients(model)
    session = scrimp.limit(model, int(peak * 0.6))

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    for interrupted in (True, False, True, False, False):
        out = model(batch)
        handle = out.register_hook(interrupt) if interrupted else None
        try:
            out.square().mean().backward()
        except KeyboardInterrupt:
            assert handle is not None
            gradients(model)
        else:
            assert_equal(gradients(model), plain)
        del out
    session.detach()
    assert not _get_current_dispatch_mode_stack()


def test_loaded_weights_and_another_type_go_on() -> None:
    """Plans are for shapes and types, not for contents."""
    model, make_batch = transformer(2)
    batch = make_batch()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    session = scrimp.limit(model, "1 GiB")
    for _ in range(2):
        model(batch).square().mean().backward()
        gradients(model)
    model.load_state_dict(state)
    model.double()
    for _ in range(2):
        torch.manual_seed(1)
        model(batch.double()).square().mean().backward()
        ours = gradients(model)
    session.detach()
    torch.manual_seed(1)
    model(batch.double()).square().mean().backward()
    assert_equal(ours, gradients(model))
