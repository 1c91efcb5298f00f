"""``scrimp.backward`` on real models, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import scrimp
from models import MODELS as MODEL_SET


def transformer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Two encoder layers with dropout."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    tokens = torch.randn(2, 16, 32)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda m: m(tokens).square().mean()


def convolutions() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A residual network with batch norm and in-place activations."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.norm(self.convolution(x)) + x, inplace=True)

    images = torch.randn(2, 4, 8, 8)
    return nn.Sequential(*[Residual() for _ in range(3)]), lambda m: m(images).mean()


def recurrent() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """An LSTM cell over twenty steps."""

    def loss(cell: nn.Module) -> Tensor:
        state = (torch.zeros(2, 8), torch.zeros(2, 8))
        for _ in range(20):
            state = cell(state[0], state)
        return state[0].sum()

    return nn.LSTMCell(8, 8), loss


def checkpointed() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """An MLP with dropout in checkpointed segments."""
    rows = torch.randn(4, 8, requires_grad=True)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(4)])
    return layers, lambda m: checkpoint_sequential(m, 2, rows, use_reentrant=False).sum()


MODELS = [transformer, convolutions, recurrent, checkpointed]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"observer": scrimp.Profile()},
    {"on_leaf_grad_ready": lambda leaf, gradient: None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "observed", "reported"])
@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_bit_identical(make: Callable[[], Any], options: dict[str, Any]) -> None:
    """Over two steps gradients and buffers are those of ``loss.backward()``."""
    torch.manual_seed(0)
    ours, loss = make()
    theirs = copy.deepcopy(ours)
    for step in range(2):
        torch.manual_seed(step)
        scrimp.backward(loss(ours), **options)
        torch.manual_seed(step)
        loss(theirs).backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_other_orders_have_the_same_gradient(make: Callable[[], Any]) -> None:
    """Depth-first and memory order differ from it by rounding at most."""
    torch.manual_seed(0)
    model, loss = make()
    gradients = []
    for order in ("torch", "depth-first", "memory"):
        model.zero_grad()
        torch.manual_seed(1)
        scrimp.backward(loss(model), order=order)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


WAYS: list[dict[str, Any]] = [{}, *OPTIONS[1:], {"workers": 1}, {"workers": 2}, {"workers": 4}, {"workers": "auto"}]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "resnet50",
        *(pytest.param(n, marks=pytest.mark.slow) for n in sorted({*MODEL_SET} - {"gpt2", "resnet50"})),
    ],
)
def test_the_model_set_is_bit_identical(name: str) -> None:
    """Plainly, observed, reported and with any number of workers: twice each, so that what was measured is used."""
    module, make_batch = MODEL_SET[name](tiny=True)
    expected = _gradients(module, make_batch(), lambda loss: loss.backward())
    for way in WAYS:
        for _ in range(2):
            found = _gradients(module, make_batch(), lambda loss, way=way: scrimp.backward(loss, **way))
            assert found.keys() == expected.keys(), way
            assert all(torch.equal(found[leaf], expected[leaf]) for leaf in expected), way


def _gradients(module: nn.Module, batch: tuple[Tensor, ...], run: Callable[[Tensor], object]) -> dict[str, Tensor]:
    """Of every parameter that has one, after one step from the same numbers."""
    module.zero_grad()
    torch.manual_seed(1)
    run(module(*batch))
    return {leaf: parameter.grad for leaf, parameter in module.named_parameters() if parameter.grad is not None}
