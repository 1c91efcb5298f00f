"""Transforms of ``torch.func`` with listed parameters, against plain autograd and closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import scrimp
from scrimp.adjoints import Unroll
from scrimp.errors import AdjointError

# Forward mode loads formulas that torch compiles with its own deprecated tool.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

DOUBLE = torch.float64


@pytest.fixture
def weight():
    """A small contraction's matrix."""
    return torch.randn(3, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 0.3


def solution(W, p):
    """X = tanh(W x + p) with both listed as arguments."""
    return scrimp.fixed_point(lambda x, W, p: torch.tanh(W @ x + p), torch.zeros(3, dtype=DOUBLE), W, p, rtol=1e-13)[0]


P = torch.tensor([0.3, -0.2, 0.5], dtype=DOUBLE)


def unrolled(W, p):
    """The same by a loop that is long enough to be exact."""
    x = torch.zeros(3, dtype=DOUBLE)
    for _ in range(150):
        x = torch.tanh(W @ x + p)
    return x


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
@pytest.mark.parametrize("argnum", [0, 1])
def test_jacobians_and_hessians(weight, transform, argnum):
    """jacrev, jacfwd and hessian agree with those of an unrolled loop."""
    found = transform(solution, argnums=argnum)(weight, P)
    torch.testing.assert_close(found, transform(unrolled, argnums=argnum)(weight, P), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("outer", "inner"), [(jacrev, jacrev), (jacrev, jacfwd), (jacfwd, jacrev)])
def test_nested_jacobians(weight, outer, inner):
    """Mixed second derivatives agree with those of an unrolled loop."""
    found = outer(inner(solution, argnums=1), argnums=0)(weight, P)
    expected = outer(inner(unrolled, argnums=1), argnums=0)(weight, P)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_nested_forward_mode_is_refused(weight):
    """Forward mode in forward mode, of which torch loses a part, is an error."""
    with pytest.raises(AdjointError, match="jacrev"):
        jacfwd(jacfwd(solution, argnums=1), argnums=0)(weight, P)


def test_grad_and_jvp(weight):
    """Grad and jvp agree with those of an unrolled loop."""
    loss = lambda f: lambda W: f(W, P).square().sum()  # noqa: E731
    torch.testing.assert_close(grad(loss(solution))(weight), grad(loss(unrolled))(weight))
    tangent = torch.ones_like(weight)
    found = jvp(lambda W: solution(W, P), (weight,), (tangent,))
    expected = jvp(lambda W: unrolled(W, P), (weight,), (tangent,))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0)])
def test_vmap(weight, in_dims):
    """A mapped solve has each sample's own solution, and mapped gradients each sample's own gradient."""
    Ws = torch.stack([weight, weight * 0.5]) if in_dims[0] == 0 else weight
    ps = torch.stack([P, -2 * P]) if in_dims[1] == 0 else P
    torch.testing.assert_close(vmap(solution, in_dims)(Ws, ps), vmap(unrolled, in_dims)(Ws, ps))
    per_sample = lambda f: vmap(grad(lambda W, p: f(W, p).square().sum()), in_dims)  # noqa: E731
    torch.testing.assert_close(per_sample(solution)(Ws, ps), per_sample(unrolled)(Ws, ps))


TWICE = {
    "vmap of jacrev": lambda f: vmap(jacrev(f)),
    "vmap of jacfwd": lambda f: vmap(jacfwd(f)),
    "vmap of hessian": lambda f: vmap(hessian(lambda p: f(p).square().sum())),
    "vmap of jvp": lambda f: vmap(lambda p: jvp(f, (p,), (torch.ones_like(p),))[1]),
    "vmap of vmap": lambda f: lambda ps: vmap(vmap(f))(torch.stack([ps, -ps])),
    "jacrev of vmap": lambda f: jacrev(vmap(f)),
    "hessian of vmap": lambda f: hessian(lambda ps: vmap(f)(ps).square().sum()),
}


@pytest.mark.parametrize("name", TWICE)
def test_maps_and_derivatives_compose(weight, name):
    """Derivatives of maps and maps of derivatives agree with those of an unrolled loop."""
    ps = torch.stack([P, -2 * P, 0.5 * P, P.flip(0)])
    ours, theirs = (TWICE[name](lambda p, f=f: f(weight, p))(ps) for f in (solution, unrolled))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_module_inside_functional_call():
    """A module that solves with its own parameters listed can be differentiated by functional_call."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.Linear(3, 3).double()
            with torch.no_grad():
                self.cell.weight.mul_(0.4)

        def forward(self, p):
            """The equilibrium."""
            f = lambda x: torch.tanh(self.cell(x) + p)  # noqa: E731
            return scrimp.fixed_point(f, torch.zeros_like(p), params=self.cell, rtol=1e-13)[0]

    layer = Layer()
    parameters = dict(layer.named_parameters())
    found = grad(lambda q: functional_call(layer, q, (P,)).square().sum())(parameters)
    expected = torch.autograd.grad(layer(P).square().sum(), list(parameters.values()))
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_roots_and_minima_under_transforms():
    """Roots and minima have the right second derivatives too."""
    cube = lambda a: scrimp.root(lambda x, a: x**3 - a, torch.ones((), dtype=DOUBLE), a, rtol=1e-13)[0]  # noqa: E731
    a = torch.tensor(8.0, dtype=DOUBLE)
    torch.testing.assert_close(grad(cube)(a), torch.tensor(1 / 12, dtype=DOUBLE))
    torch.testing.assert_close(grad(grad(cube))(a), torch.tensor(-1 / 144, dtype=DOUBLE))

    def lowest(a):
        loss = lambda x, a: x**4 / 4 - a * x  # noqa: E731
        return scrimp.argmin(loss, torch.ones((), dtype=DOUBLE), a, rtol=1e-13)[0]

    torch.testing.assert_close(grad(lowest)(a), torch.tensor(1 / 12, dtype=DOUBLE))
    torch.testing.assert_close(jacfwd(grad(lowest))(a), torch.tensor(-1 / 144, dtype=DOUBLE))


def test_forward_mode_without_transforms_is_refused(weight):
    """Dual numbers made by hand are refused, with the transform that works."""
    with forward_ad.dual_level(), pytest.raises(AdjointError, match="jvp"):
        solution(forward_ad.make_dual(weight, torch.ones_like(weight)), P)


def test_unlisted_parameters_under_vmap_are_refused():
    """Parameters that a mapped f closes over would lose their gradients: an error says to list them."""
    torch.manual_seed(0)
    cell = nn.Linear(3, 3).double()

    def solve(p, params):
        f = lambda x, p: torch.tanh(0.3 * cell(x) + p)  # noqa: E731
        return scrimp.fixed_point(f, torch.zeros(3, dtype=DOUBLE), p, params=params, rtol=1e-13)[0]

    ps = torch.stack([P, -P])
    with pytest.raises(AdjointError, match="a module as params"):
        vmap(lambda p: solve(p, None))(ps)
    vmap(lambda p: solve(p, cell))(ps).sum().backward()
    found = cell.weight.grad.clone()
    cell.weight.grad = None
    (solve(P, None).sum() + solve(-P, None).sum()).backward()
    torch.testing.assert_close(found, cell.weight.grad)


@pytest.mark.parametrize("transform", [grad, jacfwd, jacrev, hessian])
def test_closures_under_transforms_are_refused(weight, transform):
    """A closure over a transform's tensor cannot be followed, and is an error rather than a zero."""

    def closed(W):
        return scrimp.fixed_point(lambda x: torch.tanh(W @ x + P), torch.zeros(3, dtype=DOUBLE))[0].sum()

    with pytest.raises(AdjointError, match="args or params"):
        transform(closed)(weight)


def test_unrolling_under_transforms_is_refused(weight):
    """Adjoints that work on recorded steps say that transforms exclude them."""

    def unrolling(W):
        x0 = torch.zeros(3, dtype=DOUBLE)
        return scrimp.fixed_point(lambda x, W: torch.tanh(W @ x), x0, W, adjoint=Unroll())[0].sum()

    with pytest.raises(AdjointError, match="Implicit"):
        grad(unrolling)(weight)
