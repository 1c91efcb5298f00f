"""Models and training runs that the tests hold under budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import scrimp
from scrimp.testing import live_bytes


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.perceptron = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        q, k, v = (part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), 0.1)
        return x + F.dropout(self.perceptron(x), 0.1)


class Residual(nn.Module):
    """Convolutions, batch norm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """Add, normalise, activate in place."""
        return F.relu_(self.norm2(self.two(F.relu_(self.norm1(self.one(x)))) + x))


def transformer(depth: int = 4) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a stack of blocks, and what makes a batch for it."""
    return nn.Sequential(*(Block() for _ in range(depth))), lambda: torch.randn(4, 24, 32)


def resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a stack of residual blocks, and what makes a batch for it."""
    return nn.Sequential(*(Residual() for _ in range(4))), lambda: torch.randn(2, 8, 16, 16)


MODELS = {"transformer": transformer, "resnet": resnet}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training run measured and left behind.

    Attributes:
        peaks: of each step: parameters, buffers, gradients, optimizer state, batch, and live bytes.
        tensors: losses, parameters and buffers after it, and the state of the random generator.
        resident: bytes before the last step.
    """

    peaks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    resident: int


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a model and its optimizer's state."""
    state = [entry for state in optimizer.state.values() for entry in state.values() if isinstance(entry, Tensor)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state))


def train(name: str, budget: int | None = None, steps: int = 4) -> Trained:
    """Run a few steps, plainly or under a budget; the loss is computed outside of the model."""
    torch.manual_seed(0)
    model, make_batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None if budget is None else scrimp.limit(model, budget)
    peaks, losses, resident = [], [], 0
    try:
        for _ in range(steps):
            batch = make_batch()
            resident = held(model, optimizer) + batch.nbytes
            with live_bytes() as count:
                loss = model(batch).square().mean()
                loss.backward()
            peaks.append(resident + count.peak)
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if session is not None:
            session.detach()  # an error that somebody holds keeps the model, which would go on to count
    left = (*losses, *(parameter.detach() for parameter in model.parameters()), *model.buffers(), torch.get_rng_state())
    return Trained(tuple(peaks), left, resident)


def blocks(count: int = 6, width: int = 48) -> nn.Sequential:
    """Return a stack of simple blocks, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(count))
    )


def measured(step: Callable[[], object], *held_by: nn.Module) -> int:
    """Return the peak of a step: what modules hold, without gradients, and live bytes."""
    with live_bytes() as count:
        step()
    return count.peak + sum(tensor.nbytes for module in held_by for tensor in module.parameters())


def gradients(*modules: nn.Module) -> list[Tensor]:
    """Return copies of all gradients, and clear them."""
    found = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return found


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    """Fail unless all are the same to the last bit."""
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def assert_nothing_left_on() -> None:
    """Fail if a dispatch mode or saved-tensor hooks are in force."""
    assert not _get_current_dispatch_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def activations(part: float, depth: int = 4) -> tuple[nn.Module, Tensor, int]:
    """Return a model, a batch, and a part of what a plain step takes beyond gradients."""
    torch.manual_seed(0)
    model, make_batch = transformer(depth)
    batch = make_batch()
    with live_bytes() as count:
        model(batch).square().mean().backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    model.zero_grad()
    return model, batch, int((count.peak - gradients) * part)
