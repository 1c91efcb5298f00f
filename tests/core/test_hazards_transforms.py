"""Transforms of functions and of gradients: functional_call, vmap, forward mode, and no gradients at all."""

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import SessionError
from scrimp.policy import KeepNone


def chain(x: Tensor) -> Tensor:
    """A few operators that save their inputs or results."""
    return (x.sin().exp() * x.cos()).tanh().sigmoid()


def test_functional_call_swaps_parameters() -> None:
    """A region that runs a module with other parameters is replayed with those."""
    layer = nn.Linear(4, 4)
    other = {name: (p.detach() * 2).requires_grad_() for name, p in layer.named_parameters()}
    x = torch.randn(2, 4)

    def loss(checkpointed: bool) -> Tensor:
        def region(x: Tensor) -> Tensor:
            return layer(x).tanh().exp()

        def whole(x: Tensor) -> Tensor:
            return scrimp.checkpoint(region, x) if checkpointed else region(x)

        module = nn.Module()
        module.layer = layer
        module.forward = whole  # type: ignore[method-assign]
        return torch.func.functional_call(module, {f"layer.{n}": p for n, p in other.items()}, (x,)).sum()

    ours = torch.autograd.grad(loss(True), list(other.values()))
    plain = torch.autograd.grad(loss(False), list(other.values()))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert layer.weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode() -> None:
    """Tangents go through a region."""
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        ours = torch.autograd.forward_ad.unpack_dual(scrimp.checkpoint(chain, dual)).tangent
        plain = torch.autograd.forward_ad.unpack_dual(chain(dual)).tangent
    assert torch.equal(ours, plain)


def test_vmap_inside_a_region() -> None:
    """A vectorised map is recorded as the operators on whole batches that it becomes."""
    x = torch.randn(3, 4, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return torch.func.vmap(chain)(x).exp()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


def test_vmap_over_backward() -> None:
    """``is_grads_batched`` runs backward under vmap; replays are not part of that."""
    x = torch.randn(4, requires_grad=True)
    y = scrimp.checkpoint(lambda x: nn.functional.dropout(chain(x), 0.5).exp(), x)
    rows = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True, retain_graph=True)[0]
    for i in range(4):
        (row,) = torch.autograd.grad(y[i], x, retain_graph=True)
        assert torch.equal(rows[i], row)


def test_function_transforms_refuse() -> None:
    """``torch.func.grad`` cannot work with saved-tensor hooks, and says so."""
    with pytest.raises(SessionError, match=r"torch\.func"):
        torch.func.grad(lambda x: scrimp.checkpoint(chain, x).sum())(torch.randn(3))


def test_no_grad_is_a_plain_call() -> None:
    """Without gradients nothing is recorded."""
    with torch.no_grad():
        y = scrimp.checkpoint(chain, torch.ones(3, requires_grad=True))
    assert not y.requires_grad


def test_no_input_requires_grad() -> None:
    """Nothing to differentiate: the plain result, no graph and no values."""
    with scrimp.session(KeepNone()) as session:
        y = chain(torch.ones(3))
    assert not y.requires_grad
    assert session.statistics.made.total == 0
