"""Several results, and tensors that are not just a look at a storage: layouts, lazy views and subclasses."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import scrimp
from scrimp.policy import KeepAll, KeepNone


def chain(x: Tensor) -> Tensor:
    """A few operators that save their inputs or results."""
    return (x.sin().exp() * x.cos()).tanh().sigmoid()


def test_multi_output_lists_and_undefined_tensors() -> None:
    """Operators that return tuples or lists, take lists of tensors, or return nothing in some place."""
    torch.manual_seed(0)

    def region(x: Tensor) -> Tensor:
        values, indices = x.topk(2, dim=1)
        pieces = torch.stack([*x.exp().unbind(0), *torch.split(x.sin(), 1, 0)[0]])
        joined = torch.cat([values.exp(), *torch._foreach_exp([values, values * 2])], 1)
        normed = nn.functional.layer_norm(joined.tanh(), [6])
        return normed.sum() + pieces.tanh().sum() + x.gather(1, indices).exp().sum()

    x = torch.randn(3, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x), x)
    (plain,) = torch.autograd.grad(region(x), x)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_zero_size_and_scalar_tensors(shape: tuple[int, ...]) -> None:
    """Empty storages and zero-dimensional tensors are values like others."""
    x = torch.ones(shape, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(chain, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(ours, plain)


def test_complex_conjugates_and_negative_views() -> None:
    """Lazy conjugation and negation are part of how a tensor looks at its storage."""

    def region(x: Tensor) -> Tensor:
        z = torch.complex(x.sin(), x.cos())
        return ((z.conj() * z.exp()).imag.exp() * z.conj().imag).sin() + torch.view_as_real(z.conj() @ z).sum()

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors() -> None:
    """What has no strided storage is kept whole."""

    def region(x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), x.exp()[:2], (2, 2), check_invariants=False)
        return torch.sparse.mm(sparse * 2, x.sin().view(2, 2)).tanh()

    x = torch.randn(4, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    """Nested layouts, strided and jagged, go through."""

    def region(x: Tensor, layout: torch.layout) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2].exp(), x[1:].sin()], layout=layout)
        return torch.nested.to_padded_tensor(nested.sin() * 2, 0.0).tanh()

    for layout in (torch.strided, torch.jagged):
        x = torch.randn(4, 3, requires_grad=True)
        (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x, layout).sum(), x)
        (plain,) = torch.autograd.grad(region(x, layout).sum(), x)
        assert torch.equal(ours, plain)


def test_subclass_that_takes_itself_apart() -> None:
    """Of a wrapper subclass, the plain tensors within are dropped and replayed."""

    def gradient(checkpointed: bool) -> tuple[Tensor, Tensor, int]:
        x = TwoTensor(torch.linspace(0, 1, 4), torch.linspace(1, 2, 4)).requires_grad_()
        with scrimp.session(KeepNone() if checkpointed else KeepAll()) as session:
            y = chain(x)
        dropped = session.statistics.dropped.count
        y.sum().backward()
        return x.grad.a, x.grad.b, dropped

    ours, plain = gradient(True), gradient(False)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert ours[2] > 0


def test_parametrized_subclass_without_dispatch() -> None:
    """A mere Python subclass of Tensor is a plain tensor to us."""

    class Mine(Tensor):
        pass

    x = torch.randn(4).as_subclass(Mine).requires_grad_()
    (ours,) = torch.autograd.grad(scrimp.checkpoint(chain, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(ours, plain)


def test_inference_tensors() -> None:
    """What is made in inference mode counts no versions, and is never taken for replayable."""
    w = torch.randn(3, 3, requires_grad=True)

    def region(w: Tensor) -> Tensor:
        with torch.inference_mode():
            features = torch.ones(4, 3).relu()
        return ((w @ features.clone().T).exp() + torch.ones(3, 4)).sin()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, w).sum(), w)
    (plain,) = torch.autograd.grad(region(w).sum(), w)
    assert torch.equal(ours, plain)
