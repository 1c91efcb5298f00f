"""The parts together: sessions, regions, plans, the backward engine, and fixed points."""

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online, Policy


class Equilibrium(nn.Module):
    """A layer that is a fixed point, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inject = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x: Tensor, in_region: bool) -> Tensor:
        """Find the state, and mix it with the input."""
        injected = self.inject(x)

        def step(state: Tensor) -> Tensor:
            return torch.tanh(self.inner(state) + injected)

        def region(state: Tensor) -> Tensor:
            return scrimp.checkpoint(step, state)

        state, _ = scrimp.fixed_point(region if in_region else step, torch.zeros_like(x))
        result: Tensor = (state * x.exp()).sin().square().sum()
        return result


def gradients(policy: Policy, *, in_region: bool, engine: bool) -> list[Tensor]:
    """Run one step, with plain autograd or our engine, and check that nothing is left of the session."""
    torch.manual_seed(0)
    model, x = Equilibrium(), torch.randn(4, 16)
    with scrimp.session(policy) as session:
        loss = model(x * 0.3, in_region)
    if engine:
        scrimp.backward(loss)
    else:
        torch.autograd.backward(loss)
    assert session.statistics.kept.bytes == session.statistics.made.bytes == 0
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("policy", [KeepNone(), EveryN(2), Online(500)], ids=repr)
@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize("engine", [False, True])
def test_fixed_point_in_a_session(policy: Policy, in_region: bool, engine: bool) -> None:
    """With its map checkpointed or not, and whichever engine runs backward, the bits are the same."""
    plain = gradients(KeepAll(), in_region=False, engine=False)
    ours = gradients(policy, in_region=in_region, engine=engine)
    assert len(plain) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("order", ["torch", "depth-first", "memory"])
def test_orders_of_backward_over_a_session(order: str) -> None:
    """Replays follow whatever order the engine takes."""
    x = torch.randn(8, 8, requires_grad=True)

    def branches(x: Tensor) -> Tensor:
        first = (x @ x).exp().tanh()
        return (first.sin() * x.cos()).sum() + (first * 2).sigmoid().sum()

    (plain,) = torch.autograd.grad(branches(x), x)
    with scrimp.session(KeepNone()) as session:
        loss = branches(x)
    scrimp.backward(loss, order=order)
    if order == "torch":
        assert torch.equal(x.grad, plain)
    assert torch.allclose(x.grad, plain)
    assert session.statistics.made.count == 0


def test_parallel_branches_in_a_session() -> None:
    """Branches that a session surrounds run one after the other, and are recorded."""
    x = torch.randn(8, 8, requires_grad=True)
    functions = [lambda x: (x @ x).exp().tanh(), lambda x: x.sin().exp()]
    (plain,) = torch.autograd.grad(sum(f(x).sum() for f in functions), x)
    with scrimp.session(KeepNone()):
        results = scrimp.parallel(functions, x, workers=2)
        loss = sum(result.sum() for result in results)
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
