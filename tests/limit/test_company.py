"""Steps of several calls, several models, and other people's modes and checkpoints within a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import scrimp
from scrimp.testing import live_bytes

from .steps import activations, assert_nothing_left_on, transformer


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    """See that no test leaves anything on."""
    yield
    assert_nothing_left_on()


def test_gradient_accumulation() -> None:
    """The second micro-batch, which adds to gradients that are there, is a step of its own kind."""
    model, batch, budget = activations(0.6)
    results = []
    for limited in (False, True):
        torch.manual_seed(3)
        session = scrimp.limit(model, activations=budget) if limited else None
        for _ in range(3):
            model.zero_grad()
            for part in (batch, batch * 2):
                model(part).square().mean().backward()
        if session is not None:
            session.detach()
        results.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_forwards_before_a_backward_are_one_step() -> None:
    """What the first holds counts when the second runs."""
    model, batch, _ = activations(0.6, depth=2)
    peaks, gradients = [], []
    for budget in (None, 1.0, 0.6):
        session = None if budget is None else scrimp.limit(model, activations=int(peaks[0] * budget))
        for _ in range(3):
            torch.manual_seed(3)
            model.zero_grad()
            with live_bytes() as count:
                (model(batch).square().mean() + model(batch * 2).square().mean()).backward()
        if session is not None:
            assert session.plan is not None
            session.detach()
        bytes_of_gradients = sum(parameter.nbytes for parameter in model.parameters())
        peaks.append(count.peak - bytes_of_gradients)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert peaks[2] <= peaks[0] * 0.6
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


def test_two_models_in_one_step() -> None:
    """An encoder and a decoder, each limited, make one step with one plan."""
    torch.manual_seed(0)
    (encoder, make_batch), (decoder, _) = transformer(2), transformer(2)
    batch = make_batch()
    gradients = []
    for limited in (False, True):
        sessions = [scrimp.limit(model, activations="400 kB") for model in (encoder, decoder) if limited]
        for _ in range(3):
            torch.manual_seed(3)
            encoder.zero_grad()
            decoder.zero_grad()
            decoder(encoder(batch)).square().mean().backward()
        for session in sessions:
            session.detach()
        models = (encoder, decoder)
        gradients.append([parameter.grad.clone() for model in models for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_adversaries_take_turns() -> None:
    """Two limited models whose steps alternate keep their plans apart."""
    results = []
    for limited in (False, True):
        torch.manual_seed(0)
        (one, make_batch), (two, _) = transformer(2), transformer(2)
        batch = make_batch()
        sessions = [scrimp.limit(model, activations="400 kB") for model in (one, two) if limited]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
        for _ in range(3):
            optimizers[1].zero_grad()
            (two(batch).square().mean() - two(one(batch).detach()).square().mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            two(one(batch)).square().mean().backward()
            optimizers[0].step()
        for session in sessions:
            session.detach()
        results.append([parameter.detach().clone() for model in (one, two) for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_mode_of_the_users_comes_and_goes() -> None:
    """One that is entered around the recorded forward pass alone leaves properly, and ours stays below it."""

    class Mode(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    model, batch, budget = activations(0.6)
    session = scrimp.limit(model, activations=budget)
    with Mode() as mode:
        out = model(batch)
    assert mode not in _get_current_dispatch_mode_stack()
    assert mode.count
    out.square().mean().backward()
    assert session.plan is not None
    session.detach()


def test_checkpoints_inside_a_limited_model() -> None:
    """Regions of ours and of PyTorch's own keep working, with the plain gradients."""
    torch.manual_seed(0)
    blocks, make_batch = transformer(3)
    batch = make_batch().requires_grad_()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            x = scrimp.checkpoint(self.blocks[0], x)
            x = torch.utils.checkpoint.checkpoint(self.blocks[1], x, use_reentrant=False)
            return self.blocks[2](x)

    model = Mixed()
    gradients = []
    for limited in (False, True):
        session = scrimp.limit(model, activations="1 MB") if limited else None
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(2)
            model(batch).square().mean().backward()
        if session is not None:
            session.detach()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
