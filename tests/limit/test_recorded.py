"""Steps that are recorded while they run: where they end, and what replays start from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import scrimp

from .test_promises import assert_equal, blocks, gradients, measured


@torch.library.custom_op("scrimp_limit::twisted", mutates_args=())
def twisted(x: Tensor) -> Tensor:
    """Return something that the library does not know how to make again."""
    return x.roll(1, 0) * 2


@twisted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _untwisted(_: object, gradient: Tensor) -> Tensor:
    return gradient.roll(-1, 0) * 2


twisted.register_autograd(_untwisted)


class SeenAcross(nn.Module):
    """Multiplies the transpose of something small, that nobody can make again, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.body = blocks(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Look at the transpose first."""
        small = twisted(self.weight)
        mixed = torch.exp(0.01 * ((small.t() + 0.1) @ (small * 1.5) + small.t() @ small))
        return self.body(torch.sin(torch.cos(torch.tanh(mixed) + x.view(-1, 8, 8))).flatten(1))


@pytest.mark.parametrize("part", [0.9, 0.5])
def test_what_is_held_for_replays_is_held_as_it_was_made(part: float) -> None:
    """And not as it was looked at first, which was a transpose of it here."""
    model, batch = SeenAcross(), torch.randn(256, 64)

    def step() -> None:
        model(batch).square().mean().backward()

    peak, plain = measured(step, model) + batch.nbytes, gradients(model)
    session = scrimp.limit(model, int(peak * part))
    for _ in range(3):
        step()
        assert_equal(gradients(model), plain)
    session.detach()


@pytest.mark.parametrize("part", [1.05, 0.75])
def test_steps_with_gradients_of_gradients_are_steps_of_their_own(part: float) -> None:
    """Each has its whole budget, and so its peak is that of the first one."""
    model, batch = blocks(), torch.randn(96, 48, requires_grad=True)

    def step() -> None:
        loss = model(batch).square().mean()
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        (loss + slope.square().sum()).backward()

    def left() -> list[Tensor]:
        assert batch.grad is not None
        found, batch.grad = [*gradients(model), batch.grad.clone()], None
        return found

    peak, plain = measured(step, model) + batch.nbytes, left()
    budget = int(peak * part)
    session = scrimp.limit(model, budget)
    peaks = set()
    for _ in range(4):
        peaks.add(measured(step, model) + batch.nbytes)
        assert_equal(left(), plain)
    assert len(peaks) == 1
    assert peaks.pop() <= budget
    session.detach()


class Conditional(nn.Module):
    """Chooses between functions: in Python, by ``torch.cond``, or by that although they read a layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = blocks(4), nn.Linear(48, 48)
        self.way = "python"

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        x = self.last(self.body(x))
        if self.way == "closed":
            x = torch.cond(x.sum() > 0, lambda x: self.last(x).sin(), lambda x: self.last(x).cos(), (x,))
        elif self.way == "operator":
            (x,) = torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))
        else:
            x = torch.sin(x) if x.sum() > 0 else torch.cos(x)
        loss: Tensor = x.square().mean()
        return loss


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the compiler's own
def test_operators_that_take_functions_are_part_of_a_step() -> None:
    """They run as one operator, whose results are kept, around others that are dropped."""
    model, batch = Conditional(), torch.randn(96, 48)
    peak, plain = measured(lambda: model(batch).backward(), model) + batch.nbytes, gradients(model)
    model.way = "operator"
    session = scrimp.limit(model, int(peak * 0.8))
    for _ in range(2):
        model(batch).backward()
        assert_equal(gradients(model), plain)
    assert session.statistics.evicted.total
    session.detach()


def test_functions_that_read_more_than_their_operands_are_refused_with_a_word_of_advice() -> None:
    """PyTorch takes such functions only where it can compile them; the error says what to do."""
    model, batch = Conditional(), torch.randn(96, 48)
    model.way = "closed"
    session = scrimp.limit(model, "1 GiB")
    with pytest.raises(AssertionError) as caught:
        model(batch)
    session.detach()
    assert "may read no tensors but their operands" in "".join(caught.value.__notes__)
