"""`assert_same_step` passes honest sessions, fails broken ones, and tells when the step is at fault."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scrimp.testing import NondeterministicStepError, Step, assert_same_outcome, assert_same_step


def make_step() -> Step:
    """Dropout, batch norm's buffers, and a loss."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
    )
    x = torch.randn(16, 4, requires_grad=True)
    return Step(lambda: model(x).square().mean(), state=(model, x))


def replace_saved(change: Callable[[Tensor], Tensor]) -> Callable[[], AbstractContextManager[object]]:
    """A session that hands `change(saved)` to backward."""
    return lambda: saved_tensors_hooks(lambda saved: saved, change)


def flip_a_bit(saved: Tensor) -> Tensor:
    """Change the mantissa's top bit in one element of the hidden activations."""
    changed = saved.detach().clone()
    if changed.dtype == torch.float32 and changed.shape == (16, 8):
        changed.view(torch.int32)[0, 0] ^= 1 << 22
    return changed


@contextmanager
def draw_after_forward(draw: Callable[[], object]) -> Iterator[None]:
    """A session that does something once too often."""
    yield
    draw()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_an_honest_session_passes(backward_inside: bool) -> None:
    """Copies of what autograd saves change nothing."""
    assert_same_step(make_step, replace_saved(torch.clone), backward_inside=backward_inside)


def test_one_flipped_bit_in_a_saved_tensor_fails() -> None:
    """The gradient that it changes is named."""
    with pytest.raises(AssertionError, match=r"gradient of state.* differs in \d+ of \d+ elements"):
        assert_same_step(make_step, replace_saved(flip_a_bit))


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch's CPU generator"),
        (lambda: random.random(), "Python"),
        (lambda: np.random.random(), "NumPy"),
    ],
)
def test_a_skewed_default_generator_fails(draw: Callable[[], object], name: str) -> None:
    """One draw too many from a default generator is seen in its next draw."""
    with pytest.raises(AssertionError, match=f"next draw of {name} differs"):
        assert_same_step(make_step, lambda: draw_after_forward(draw))


def test_a_skewed_generator_of_the_users_own_fails() -> None:
    """Generators listed in the step are compared too."""
    drawn: list[torch.Generator] = []

    def make() -> Step:
        generator = torch.Generator().manual_seed(1)
        drawn.append(generator)
        x = torch.randn(3, requires_grad=True)
        return Step(lambda: x * torch.rand(3, generator=generator), state=x, generators=[generator])

    assert_same_step(make, nullcontext)
    with pytest.raises(AssertionError, match=r"next draw of generators\[0\] differs"):
        assert_same_step(make, lambda: draw_after_forward(lambda: torch.rand(1, generator=drawn[-1])))


def test_a_buffer_updated_twice_fails() -> None:
    """Running statistics that see a batch twice are found, although every gradient is right."""
    models: list[torch.nn.Module] = []

    def make() -> Step:
        step = make_step()
        models.append(step.state[0])
        return step

    with pytest.raises(AssertionError, match=r"state\[0\]\.1\.running_mean differs"):
        assert_same_step(make, lambda: draw_after_forward(lambda: models[-1][:2](torch.ones(2, 4))))


def test_a_missing_gradient_fails() -> None:
    """A gradient that is None in one run only is a difference."""

    def make(detach: bool) -> Step:
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        return Step(lambda: x * (y.detach() if detach else y), state={"x": x, "y": y})

    with pytest.raises(AssertionError, match=r"gradient of state\['y'\] differs: expected a tensor"):
        assert_same_outcome(lambda: make(False), lambda: make(True))


def test_different_outputs_fail() -> None:
    """The number of output tensors is compared before their bits."""
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(AssertionError, match=r"missing \['output\[1\]'\], extra \[\]"):
        assert_same_outcome(lambda: Step(lambda: (x.sin(), x.cos())), lambda: Step(lambda: (x.sin(),)))


def test_a_step_that_does_not_repeat_is_blamed_itself() -> None:
    """A generator seeded by the clock is the step's fault."""

    def make() -> Step:
        generator = torch.Generator()
        generator.seed()
        x = torch.randn(3, requires_grad=True)
        return Step(lambda: x * torch.rand(3, generator=generator), state=x)

    with pytest.raises(NondeterministicStepError, match="two plain runs from the same seeds differ already"):
        assert_same_step(make, nullcontext)


def test_a_step_that_is_not_built_anew_is_blamed_itself() -> None:
    """Gradients that pile up in a shared parameter are not compared with themselves."""
    shared = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with pytest.raises(NondeterministicStepError, match="Build everything anew in make_step"):
        assert_same_step(lambda: Step(lambda: shared(x), state=shared), nullcontext)


def test_a_step_without_gradients_is_refused() -> None:
    """Forgetting the state would make a test that cannot fail."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Need a step whose state has gradients"):
        assert_same_step(lambda: Step(lambda: model(torch.ones(1, 2))), nullcontext)


def test_an_exception_of_the_session_is_not_hidden() -> None:
    """What scrimp raises reaches the caller."""

    def refuse(saved: Tensor) -> Tensor:
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        assert_same_step(make_step, replace_saved(refuse))


def test_random_states_are_put_back() -> None:
    """Judging a step draws nothing from the generators of the test around it."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert_same_step(make_step, nullcontext)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
