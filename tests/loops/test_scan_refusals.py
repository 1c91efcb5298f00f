"""What a step of ``scrimp.scan`` must not do, nor anybody before backward: errors that say so."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import (
    LoopError,
    SourceChangedError,
)


def scaled(w: Tensor) -> Any:
    """A step."""
    return lambda h, _: ((h * w).sin(), None)


@pytest.fixture
def w() -> Tensor:
    """A parameter."""
    return torch.full((3,), 0.9, requires_grad=True)


def test_a_parameter_changed_before_backward(w: Tensor) -> None:
    """Steps would be run again with other numbers."""
    h, _ = scrimp.scan(scaled(w), torch.ones(3), length=5, slots=2)
    with torch.no_grad():
        w += 1
    with pytest.raises(SourceChangedError, match="from outside"):
        h.sum().backward()


def test_a_constant_changed_before_backward(w: Tensor) -> None:
    """Also tensors that need no gradient count."""
    c = torch.ones(3)
    h, _ = scrimp.scan(lambda h, _: (h * w + c, None), torch.ones(3), length=5, slots=2)
    c += 1
    with pytest.raises(SourceChangedError):
        h.sum().backward()


def test_the_first_state_or_xs_changed_before_backward(w: Tensor) -> None:
    """Autograd itself raises, as for any saved tensor."""
    for change in range(2):
        start, xs = torch.ones(3), torch.ones(4, 3)
        h, _ = scrimp.scan(lambda h, x: (h * w + x, None), start, xs, slots=2)
        (start, xs)[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()


def test_a_state_that_is_passed_through_changed_before_backward(w: Tensor) -> None:
    """A kept state shares memory with what the caller got."""
    (h, c), _ = scrimp.scan(
        lambda s, x: (((s[0] * w * s[1]).sin(), s[1] if x > 1 else s[1] + 1), None),
        (torch.ones(3), torch.ones(3)), torch.arange(6), slots=3,
    )  # fmt: skip
    c.add_(1)
    with pytest.raises((SourceChangedError, RuntimeError), match="modified"):
        h.sum().backward()


def test_a_parameter_replaced_before_backward() -> None:
    """The step reads another tensor when it runs again."""
    model = nn.Linear(3, 3)
    h, _ = scrimp.scan(lambda h, _: (model(h), None), torch.ones(3), length=4, slots=2)
    model.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(LoopError, match="did not read the first time"):
        h.sum().backward()


def test_functional_call_around_the_loop() -> None:
    """Parameters that are in place only during forward; torch's checkpoint takes the others, without a word."""

    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, h: Tensor) -> Tensor:
            return scrimp.scan(lambda h, _: ((h * self.w).sin(), None), h, length=4, slots=2)[0]

    model, other = Looping(), torch.full((3,), 2.0, requires_grad=True)
    h = torch.func.functional_call(model, {"w": other}, torch.ones(3))
    with pytest.raises(LoopError, match="functional_call inside the step"):
        h.sum().backward()


def test_another_branch_when_it_runs_again(w: Tensor) -> None:
    """Python state that decides otherwise the second time."""
    calls = []

    def step(h: Tensor, _: None) -> Any:
        calls.append(1)
        return (h * w if len(calls) <= 4 else h.detach(), None)

    h, _ = scrimp.scan(step, torch.ones(3), length=4, slots=2)
    with pytest.raises(LoopError, match="something else"):
        h.sum().backward()


def test_a_state_beside_the_state(w: Tensor) -> None:
    """A tensor that one step leaves for the next, with a history or without."""
    for detach in (False, True):
        left: dict[str, Tensor] = {}

        def step(h: Tensor, _: None, left: dict[str, Tensor] = left, detach: bool = detach) -> Any:
            h = (h * w + left.get("last", torch.zeros(3))).sin()
            left["last"] = (h * 2).detach() if detach else h * 2
            return h, None

        with pytest.raises(LoopError, match="earlier step"):
            scrimp.scan(step, torch.ones(3), length=6, slots=2)


def test_a_cache_that_the_first_step_fills_is_fine(w: Tensor) -> None:
    """A constant that is computed once and stays."""
    cache: list[Tensor] = []

    def step(h: Tensor, _: None) -> Any:
        if not cache:
            cache.append(torch.linspace(0, 1, 3))
        return (h * w + cache[0]).sin(), None

    h, _ = scrimp.scan(step, torch.ones(3), length=6, slots=2)
    h.sum().backward()
    assert w.grad is not None


def test_a_tensor_that_escapes_from_a_step(w: Tensor) -> None:
    """What a step leaves outside has no way back to the state: it is an error to differentiate it."""
    log: list[Tensor] = []

    def step(h: Tensor, _: None) -> Any:
        h = (h * w).sin()
        log.append(h.sum())
        return h, None

    scrimp.scan(step, torch.ones(3), length=4, slots=2)
    with pytest.raises(LoopError, match="return it as an output"):
        log[-1].backward()


def test_writing_to_the_state(w: Tensor) -> None:
    """The state has to stay as it is."""
    with pytest.raises((LoopError, RuntimeError), match="place"):
        scrimp.scan(lambda h, _: (h.mul_(0.5) * w, None), torch.ones(3), length=3)
    with pytest.raises(LoopError, match="its x"):
        scrimp.scan(lambda h, x: (h * w + x.mul_(2), None), torch.ones(3), torch.ones(4, 3))


def test_writing_values_with_a_history_to_the_outside(w: Tensor) -> None:
    """Gradients could not follow."""
    buffer = torch.zeros(4, 3)

    def step(h: Tensor, i: Tensor) -> Any:
        h = (h * w).sin()
        buffer[i] = h
        return h, None

    with pytest.raises(LoopError, match="return them as an output"):
        scrimp.scan(step, torch.ones(3), torch.arange(4))


def test_numpy_memory_that_lives_for_one_step_is_fine(w: Tensor) -> None:
    """torch.from_numpy in a step."""
    arrays = [np.full(3, float(i), dtype=np.float32) for i in range(6)]

    def step(state: Any, _: None) -> Any:
        h, i = state
        return ((h * w + torch.from_numpy(arrays[i])).sin(), i + 1), None

    (h, _), _ = scrimp.scan(step, (torch.ones(3), 0), length=6, slots=2)
    h.sum().backward()
    assert w.grad is not None


def test_an_until_that_draws(w: Tensor) -> None:
    """The condition is not asked again in backward, so it may not draw."""
    with pytest.raises(LoopError, match="until"):
        scrimp.scan(scaled(w), torch.ones(3), until=lambda h: torch.rand(()) < 0.1, slots=2)


@pytest.mark.parametrize("backward", [False, True])
def test_a_derivative_through_the_steps_before(w: Tensor, backward: bool) -> None:
    """In the plain loop it would go through all of them; here there is no way to the second step's ancestors."""

    def step(h: Tensor, _: None) -> Any:
        loss = (h * w).sin().sum()
        if backward:
            loss.backward(retain_graph=True)
            return h * w, None
        return h - torch.autograd.grad(loss, w, create_graph=True)[0], None

    with pytest.raises(LoopError, match="view_as"):
        scrimp.scan(step, torch.ones(3), length=3, slots=2)


def numpy_generator() -> Any:
    """Draws from a generator that is not NumPy's global one."""
    generator = np.random.default_rng(0)
    return lambda: torch.from_numpy(generator.normal(size=3).astype(np.float32))


def python_generator() -> Any:
    """Draws from a generator that is not Python's global one."""
    generator = random.Random(0)
    return lambda: generator.random()


def counter() -> Any:
    """Counts."""
    counted = itertools.count(1)
    return lambda: next(counted)


@pytest.mark.parametrize("make", [numpy_generator, python_generator, counter], ids=lambda make: make.__name__)
@pytest.mark.parametrize("until", [False, True], ids=["known", "unknown"])
def test_python_state_that_a_step_changes(w: Tensor, make: Any, until: bool) -> None:
    """It cannot be set back, and the last step that runs again gives it away."""
    draw = make()
    with pytest.raises(LoopError, match="something else when it ran again"):  # noqa: PT012
        h, _ = scrimp.scan(
            lambda h, _: ((h * w * draw()).sin(), None), torch.ones(3), length=6, slots=2,
            until=(lambda _: False) if until else None,
        )  # fmt: skip
        h.sum().backward()


def test_noise_in_an_output_alone(w: Tensor) -> None:
    """Outputs that require grad are compared, too; others may say what they like, such as the time."""
    counted = itertools.count(1)
    h, _ = scrimp.scan(lambda h, _: ((h * w).sin(), torch.tensor(next(counted))), torch.ones(3), length=6, slots=2)
    h.sum().backward()
    h, ys = scrimp.scan(lambda h, _: ((h * w).sin(), (h * w).sum() * next(counted)), torch.ones(3), length=6, slots=2)
    with pytest.raises(LoopError, match="something else"):
        ys.sum().backward()


def test_a_module_switched_before_backward() -> None:
    """eval() after forward would have the steps run again without dropout."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    h, _ = scrimp.scan(lambda h, _: (model(h).sin(), None), torch.ones(2, 3), length=6, slots=2)
    model.eval()
    with pytest.raises(LoopError, match="eval"):
        h.sum().backward()


def test_numbers_that_are_none_are_the_same_again(w: Tensor) -> None:
    """NaN, infinity and negative zero in states and outputs of any layout are no difference."""
    nan = float("nan")

    def step(s: Any, _: None) -> Any:
        h, wide, number, flags = s
        h = torch.stack([h[0] * w[0], h[1] * nan, -h[2] / 0.0])
        return (h, wide.t().contiguous().t(), number, flags.logical_not()), h.to(torch.bfloat16)[:2] * w[0].bfloat16()

    h, ys = scrimp.scan(
        step, (torch.ones(3), torch.ones(2, 3).t(), nan, torch.ones(5, dtype=torch.bool)), length=4, slots=2
    )
    (h[0].nansum() + ys.float().nansum()).backward()
    assert w.grad is not None
