"""Nesting: sessions in sessions, regions in regions, and both with checkpoints and hooks of torch's own."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online


def chain(x: Tensor) -> Tensor:
    """A few operators that save their inputs or results."""
    return (x.sin().exp() * x.cos()).tanh().sigmoid()


def test_output_of_one_session_feeds_another() -> None:
    """The second starts from the first one's result."""
    x = torch.randn(5, requires_grad=True)
    y = x
    for _ in range(3):
        y = scrimp.checkpoint(chain, y)
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(x))).sum(), x)
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("outer", [KeepAll(), KeepNone(), EveryN(2), Online(60)])
@pytest.mark.parametrize("inner", [KeepAll(), KeepNone(), EveryN(2)])
def test_nested_sessions(outer: scrimp.policy.Policy, inner: scrimp.policy.Policy) -> None:
    """A checkpoint inside a session inside a checkpoint."""
    x = torch.randn(5, requires_grad=True)

    def middle(x: Tensor) -> Tensor:
        y = chain(x)
        with scrimp.session(outer):
            y = scrimp.checkpoint(chain, y, policy=inner).exp()
            y = scrimp.checkpoint(chain, y, policy=inner)
        return y.sin()

    y = scrimp.checkpoint(middle, x, policy=inner)
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(x)).exp()).sin().sum(), x)
    assert torch.equal(x.grad, plain)


def test_nested_checkpoints_replay_region_by_region() -> None:
    """A region within a dropped region keeps nothing, and backward holds one inner region's values at a time."""
    x = torch.randn(1000, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        for _ in range(8):
            x = scrimp.checkpoint(chain, x)
        return x

    with scrimp.session(KeepNone()) as session:
        y = outer(x)
    assert session.statistics.kept.bytes == 0
    y.sum().backward()
    inputs_of_regions = 7
    assert session.statistics.kept.peak_bytes <= (inputs_of_regions + 3) * 4000
    operators_of_a_region = 6
    assert session.statistics.replayed_operators <= 8 * operators_of_a_region * 2
    (plain,) = torch.autograd.grad(outer(x).sum(), x)
    assert torch.equal(x.grad, plain)


def test_a_region_keeps_its_input_under_a_keeping_session() -> None:
    """Chained regions in a session that keeps: each is replayed from its own input, not from the beginning."""
    x = torch.randn(1000, requires_grad=True)
    with scrimp.session(EveryN(1)) as session:
        y = x
        for _ in range(4):
            y = scrimp.checkpoint(chain, y)
    assert session.statistics.kept.bytes == 3 * 4000
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(chain(x)))).sum(), x)
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_inside_ours(reentrant: bool) -> None:
    """Torch's region runs its own hooks; around it we go on."""
    x = torch.randn(5, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return torch_checkpoint(chain, chain(x), use_reentrant=reentrant).exp().sin()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x) if not reentrant else (None,)
    if reentrant:
        scrimp.checkpoint(region, x).sum().backward()
        ours = x.grad
    (plain,) = torch.autograd.grad(chain(chain(x)).exp().sin().sum(), x)
    assert torch.equal(ours, plain)


def test_ours_inside_torch_checkpoint() -> None:
    """Torch repeats the Python code of its region, ours within it too."""
    x = torch.randn(5, requires_grad=True)
    y = torch_checkpoint(lambda x: scrimp.checkpoint(chain, chain(x)).exp(), x, use_reentrant=False)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(chain(chain(x)).exp().sum(), x)
    assert torch.equal(ours, plain)


def test_save_on_cpu_inside_ours() -> None:
    """Other saved-tensor hooks inside take over what is saved there."""
    x = torch.randn(5, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = chain(x)
        return chain(y)

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(chain(x)).sum(), x)
    assert torch.equal(ours, plain)
