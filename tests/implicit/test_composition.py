"""Equilibrium layers inside the rest of scrimp, and the rest of scrimp inside equilibrium layers: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp.adjoints import Implicit
from scrimp.policy import KeepNone
from scrimp.solvers import BiCGSTAB, Picard
from scrimp.testing import live_bytes

DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
Wrap = Callable[..., Tensor]
Around = Callable[[nn.Module], AbstractContextManager[object]]


class Cell(nn.Module):
    """A block that is wider inside than its state, and slow enough to make the solver accelerate."""

    def __init__(self, n: int = 16) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        """The next state."""
        return torch.tanh(u + 1.5 * self.narrow(F.gelu(self.wide(x))))


class Model(nn.Module):
    """An encoder, an equilibrium whose cell may be wrapped, and a head with dropout."""

    def __init__(self, wrap: Wrap | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))
        self.cell = Cell()
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 2))
        self.wrap = wrap

    def forward(self, data: Tensor) -> Tensor:
        """Scores."""
        u = self.encode(data)
        cell = self.cell if self.wrap is None else lambda x, u: self.wrap(self.cell, x, u)
        x, info = scrimp.fixed_point(cell, torch.zeros_like(u), u, batch_dims=1)
        assert info.total_evaluations > 8
        return self.head(x)


def trained(model: nn.Module, around: Around = lambda model: nullcontext(), steps: int = 4) -> list[Tensor]:
    """Losses and weights of some steps of training, on data that make the solver take different numbers of steps."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        with around(model):
            loss = model(DATA * (0.1, 3.0, 0.5, 10.0)[step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all bits agree."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    """What training without any of it gives."""
    return trained(Model())


@contextmanager
def recorded(_: nn.Module) -> Iterator[None]:
    """A session that drops all it may."""
    with scrimp.session(policy=KeepNone()):
        yield


def test_equilibrium_in_a_session_that_drops(plain):
    """A session around a model that solves recomputes around the solution, and changes no bit."""
    assert same(trained(Model(), recorded), plain)


def test_equilibrium_in_a_session_with_a_budget(plain):
    """A session that is short of bytes as it runs changes no bit."""
    session = scrimp.session("300KB")
    try:
        assert same(trained(Model(), lambda _: session), plain)
    finally:
        session.detach()


def test_equilibrium_in_a_limited_model(plain):
    """A limited model whose solver takes another number of steps each time trains to the same bits."""
    model = Model()
    session = scrimp.limit(model, "300KB")
    try:
        assert same(trained(model), plain)
    finally:
        session.detach()


def test_limited_cell(plain):
    """A cell that is limited itself is solved and differentiated to the same bits."""
    model = Model()
    session = scrimp.limit(model.cell, "300KB")
    try:
        assert same(trained(model), plain)
    finally:
        session.detach()


def with_torch_checkpoint(cell: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    """Torch's own."""
    return checkpoint(cell, x, u, use_reentrant=False)


@pytest.mark.parametrize("wrap", [scrimp.checkpoint, with_torch_checkpoint], ids=["scrimp", "torch"])
def test_checkpointed_cell(plain, wrap):
    """A cell that is computed again in each product gives the same bits."""
    assert same(trained(Model(wrap)), plain)


def test_checkpointed_cell_in_a_session(plain):
    """A checkpoint inside the equation inside a session gives the same bits."""
    assert same(trained(Model(scrimp.checkpoint), recorded), plain)


def peak(steps: int, around: AbstractContextManager[object]) -> int:
    """Peak bytes of exactly so many steps of a map without a fixed point, forward and backward."""
    cell, u = Cell(64), torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    options = {"solver": Picard(), "adjoint": Implicit(BiCGSTAB(20)), "on_fail": "ignore", "max_steps": steps}
    with live_bytes() as memory:
        with around:
            x, info = scrimp.fixed_point(lambda x: x + cell(x, u) + 3, torch.zeros(64, 64), batch_dims=1, **options)
            loss = x.square().sum()
        loss.backward()
    assert int(info.steps.max()) == steps
    return memory.peak


def test_memory_in_a_session_is_flat():
    """What a session that drops all it may records does not grow with the solver's steps."""
    few, many = (peak(steps, scrimp.session(policy=KeepNone())) for steps in (10, 100))
    assert many <= 1.05 * few


def test_memory_in_a_session_with_a_budget_is_flat():
    """Nor does what a session records that has bytes enough to keep everything."""
    peaks = []
    for steps in (10, 100):
        session = scrimp.session("1GiB")
        try:
            peaks.append(peak(steps, session))
        finally:
            session.detach()
    assert peaks[1] <= 1.05 * peaks[0]
