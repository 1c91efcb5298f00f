"""Small programs, each with a trick that a replay could trip over; bit for bit against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online
from scrimp.testing import Step, assert_same_step

Program = Callable[[Tensor], Tensor]
PROGRAMS: dict[str, Program] = {}

# Parts of torch warn that they are deprecated or prototypes.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def program(function: Program) -> Program:
    """Add a program to the zoo; it gets a leaf of 12 elements and returns anything that depends on it."""
    PROGRAMS[function.__name__] = function
    return function


# -- storages ---------------------------------------------------------------------------------------------------------


@program
def overlapping_strides(x: Tensor) -> Tensor:
    """A window over memory reads elements several times; part of other memory is overwritten."""
    y = x.sin()
    windows = y.as_strided((4, 4), (2, 1), 1)
    z = y * 2
    z.as_strided((5,), (1,), 0).mul_(x[:5])
    return (windows.exp() * windows).sum() + z.exp()


@program
def expanded(x: Tensor) -> Tensor:
    """Many elements, little memory."""
    y = x.sin().view(1, 12).expand(4, 12)
    return (y.exp() * y.t().cos().t() * y).sum()


@program
def complex_views(x: Tensor) -> Tensor:
    """Conjugate, negative and real views of complex memory, some of them written."""
    y = torch.complex(x[:6], x[6:]).sin()
    conjugate = y.conj()
    z = (conjugate * 2).exp() * conjugate.imag.exp() * torch.view_as_real(y).square().sum(-1)
    w = y * 1
    w.real.mul_(3)
    w.imag.neg_()
    noise = torch.randn(6, dtype=torch.complex64)
    noise.conj().imag.mul_(2)
    return (z.abs() * w.conj().imag.sin() * w.exp().abs() * noise.imag.exp()).sum()


@program
def other_dtypes_of_the_same_memory(x: Tensor) -> Tensor:
    """Bits are changed through a view of integers."""
    y = x.detach() * 3
    y.view(torch.int32).bitwise_xor_(1)
    return (x * y.exp() * y).sin()


@program
def copies_across_dtypes(x: Tensor) -> Tensor:
    """``copy_`` converts and broadcasts, into the whole or a part."""
    wide, narrow = torch.zeros(12, dtype=torch.float64), torch.empty(12, dtype=torch.bfloat16)
    wide.copy_(x.sin())
    narrow.copy_(wide.exp())
    rows = torch.full((4, 12), 2.0)
    rows[1:3].copy_(x.sin())
    y = rows.exp().float() * narrow.float().sin()
    rows = rows * 1
    rows[0].copy_(x.cos())
    rows.copy_(rows)
    return y * rows.sin()


@program
def indexed_writes(x: Tensor) -> Tensor:
    """By index, by mask, with duplicates, accumulated."""
    index = torch.tensor([0, 2, 2])
    y = x.sin().clone()
    y[index] = x[:3].exp()
    z = y.cos() * 1
    z.index_put_((index,), x[3:6], accumulate=True)
    mask = z > 0
    w = z.masked_fill(mask, 2.0).exp()
    w = w * 1
    w[mask] = 1.5
    return w.sin() * z[index + 1].sum()


@program
def many_at_once(x: Tensor) -> Tensor:
    """``foreach`` operators take lists, in place as well, of views of one tensor too."""
    parts = [x[:6] * 2, x[6:].exp()]
    y = torch._foreach_add(torch._foreach_exp(parts), parts, alpha=2)
    z = [one * 1 for one in y]
    torch._foreach_mul_(z, 3.0)
    whole = x * 2
    torch._foreach_mul_([whole[:6], whole[6:]], 2.0)
    twice = x.detach().clone()
    torch._foreach_add_([twice, twice], 1.0)
    return torch.cat(z).sin() * whole.exp() * (twice * x).exp()


@program
def reshaped_in_place(x: Tensor) -> Tensor:
    """The tensor object changes, its memory does not."""
    y = (x * 2).view(1, 12)
    z = y * 1
    z.squeeze_(0)
    w = z.exp()
    z.unsqueeze_(1).transpose_(0, 1)
    return y.sigmoid() * w * z.cos()


@program
def memory_that_grows(x: Tensor) -> Tensor:
    """A cache is filled row by row, and read as it is after each."""
    cache = torch.zeros(4, 3)
    total = x.new_zeros(())
    for row in range(4):
        cache[row] = x.view(4, 3)[row].sin()
        total = total + (cache.clone()[: row + 1] @ cache.clone()[row]).softmax(0).exp().sum()
    return total


@program
def cloned_lazily(x: Tensor) -> Tensor:
    """Two tensors share memory until one is written."""
    y = torch._lazy_clone(x * 2)
    z = torch._lazy_clone(y)
    z.mul_(3)
    return y.exp() * z.sin()


@program
def overwritten_by_random_numbers(x: Tensor) -> Tensor:
    """The same buffer holds one draw after the other."""
    buffer = torch.empty(12).uniform_()
    y = (x + buffer).exp()
    buffer.normal_()
    z = x + buffer
    buffer[::2].bernoulli_(0.5)
    F.dropout(z, 0.5, inplace=True)
    return y * z.sin() * (buffer + x).exp()


# -- other parts of torch ---------------------------------------------------------------------------------------------


@program
def quantized(x: Tensor) -> Tensor:
    """Tensors with a scale of their own."""
    q = torch.quantize_per_tensor(x.detach().sin(), 0.1, 0, torch.quint8)
    return (x * q.dequantize() * torch.fake_quantize_per_tensor_affine(x.cos(), 0.1, 0, 0, 255)).exp()


@program
def sparse(x: Tensor) -> Tensor:
    """Products with a sparse matrix."""
    return torch.sparse.mm(torch.eye(4).to_sparse(), x.view(4, 3).sin()).exp()


@program
def jagged(x: Tensor) -> Tensor:
    """Nested tensors."""
    nested = torch.nested.as_nested_tensor([x[:4].sin().view(1, 4), x[4:].cos().view(2, 4)], layout=torch.jagged)
    return (nested.sin() * nested).values().exp()


@program
def mapped(x: Tensor) -> Tensor:
    """``vmap``, with randomness of its own."""
    rows = torch.vmap(lambda row: F.dropout(row.sin(), 0.5).exp() * row.sum(), randomness="different")(x.view(3, 4))
    return rows.cos()


@program
def forward_mode(x: Tensor) -> Tensor:
    """A directional derivative, differentiated again."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x * 2, torch.ones(12))
        y, tangent = torch.autograd.forward_ad.unpack_dual((dual.sin() * dual).exp())
        return y * tangent


@program
def torch_checkpoints(x: Tensor) -> Tensor:
    """Both kinds, and one in a region of ours."""
    region = nn.Sequential(nn.GELU(), nn.Dropout(), nn.Tanh())
    y = torch_checkpoint(region, x.sin(), use_reentrant=False).exp()
    y = torch_checkpoint(region, y, use_reentrant=True)
    return scrimp.checkpoint(lambda z: torch_checkpoint(region, z.sin(), use_reentrant=False).cos(), y)


@program
def decompositions(x: Tensor) -> Tensor:
    """Several outputs, some of which are not used."""
    matrix = x[:9].view(3, 3).sin() + torch.eye(3) * 3
    return torch.linalg.svd(matrix)[1].exp().sum() + torch.linalg.qr(matrix.exp())[0].sum()


@program
def numbers(x: Tensor) -> Tensor:
    """Scalars of other types, and one read from a tensor."""
    y = x.half() * torch.tensor(2.0, dtype=torch.float64)
    return (torch.add(y, 2, alpha=3).exp() * y.detach().max().item()).float().sin() * torch.scalar_tensor(3.0)


@program
def hooks_that_change_gradients(x: Tensor) -> Tensor:
    """On results, once each."""
    y = x.sin()
    y.register_hook(lambda gradient: gradient * 2)
    z = y.exp()
    z.register_hook(lambda gradient: gradient + 1)
    return z.cos() * z


@program
def parts_that_are_thrown_away(x: Tensor) -> Tensor:
    """A graph of which backward walks one half."""
    y = x.exp()
    z = y.sin()
    _ = (z * y).cos()
    return z


@pytest.mark.parametrize("backward_inside", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_exact(name: str, backward_inside: bool, random_policy: Callable[..., Any]) -> None:
    """With everything dropped, with parts dropped, and with everything evicted at once."""

    def make_step() -> Step:
        x = torch.randn(12, requires_grad=True)
        return Step(lambda: PROGRAMS[name](x), state=x)

    for policy in (KeepNone(), EveryN(2), Online(0), Online(100), KeepAll(), random_policy(1), random_policy(2)):
        assert_same_step(make_step, lambda: scrimp.session(policy), backward_inside=backward_inside)  # noqa: B023
