"""Gradients reach everything that the equation depends on, and are right to any order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp.errors import OrderError

N = 3


@pytest.fixture
def tensors():
    """W, b and p of a small contraction, in double precision."""
    generator = torch.Generator().manual_seed(1)
    W = torch.randn(N, N, generator=generator, dtype=torch.float64) * 0.3
    b = torch.randn(N, generator=generator, dtype=torch.float64)
    p = torch.randn(2, N, generator=generator, dtype=torch.float64)
    return tuple(t.requires_grad_() for t in (W, b, p))


def solve(W, b, p, **options):
    """The solution of x = tanh(x W + b + p) for explicit arguments."""
    x0 = torch.zeros(p.shape, dtype=p.dtype)
    f = lambda x, W, b, p: torch.tanh(x @ W + b + p)  # noqa: E731
    return scrimp.fixed_point(f, x0, W, b, p, batch_dims=1, rtol=1e-13, **options)[0]


def test_gradcheck_of_arguments(tensors):
    """First derivatives with respect to arguments agree with finite differences."""
    assert torch.autograd.gradcheck(solve, tensors)


def test_gradcheck_of_closures(tensors):
    """First derivatives with respect to tensors that f closes over agree with finite differences."""

    def closed(W, b, p):
        x0 = torch.zeros(p.shape, dtype=p.dtype)
        return scrimp.fixed_point(lambda x: torch.tanh(x @ W + b + p), x0, batch_dims=1, rtol=1e-13)[0]

    assert torch.autograd.gradcheck(closed, tensors)


def test_gradcheck_of_what_comes_before(tensors):
    """Tensors that f closes over may themselves be results."""

    def closed(W, b, p):
        W2, h = torch.sin(W), torch.exp(p) + b
        return scrimp.fixed_point(lambda x: torch.tanh(x @ W2 + h), torch.zeros_like(h), batch_dims=1, rtol=1e-13)[
            0
        ].square()

    assert torch.autograd.gradcheck(closed, tensors)


def test_gradgradcheck_with_order_two(tensors):
    """Second derivatives agree with finite differences where order=2 was asked for."""
    assert torch.autograd.gradgradcheck(lambda *t: solve(*t, order=2), tensors)


def test_gradgradcheck_of_root_and_argmin(tensors):
    """Second derivatives of roots and minima agree with finite differences."""
    _, b, p = tensors
    x0 = torch.zeros(p.shape, dtype=p.dtype)

    def cube_root(b, p):
        return scrimp.root(lambda x: x**3 + x - b * p, x0, batch_dims=1, order=2, rtol=1e-13)[0]

    def nearest(b, p):
        loss = lambda x: ((x - p) ** 2).sum(-1) + (b**2 * x.cosh()).sum(-1)  # noqa: E731
        return scrimp.argmin(loss, x0, batch_dims=1, order=2, rtol=1e-13)[0]

    assert torch.autograd.gradgradcheck(cube_root, (b, p))
    assert torch.autograd.gradgradcheck(nearest, (b, p))


def test_third_derivatives_of_a_scalar():
    """order=3 gives the third derivative of the square root."""
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x, _ = scrimp.root(lambda x, a: x * x - a, torch.ones_like(a), a, order=3, rtol=1e-14)
    first = torch.autograd.grad(x, a, create_graph=True)[0]
    second = torch.autograd.grad(first, a, create_graph=True)[0]
    third = torch.autograd.grad(second, a)[0]
    expected = [0.5 * 2**-0.5, -0.25 * 2**-1.5, 0.375 * 2**-2.5]
    assert [first.item(), second.item(), third.item()] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("linear_loss", [True, False])
def test_too_low_order_raises(tensors, linear_loss):
    """A second derivative with order=1 is refused, also where the cotangent is constant."""
    x = solve(*tensors)
    loss = x.sum() if linear_loss else x.square().sum()
    (first,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
    with pytest.raises(OrderError, match="order=2"):
        torch.autograd.grad(first.sum(), tensors[0])


def test_third_derivative_with_order_two_raises(tensors):
    """The order is counted, not only whether it is one."""
    x = solve(*tensors, order=2)
    (first,) = torch.autograd.grad(x.sum(), tensors[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(OrderError):
        torch.autograd.grad(second.sum(), tensors[0])


def reference_gradients(module, p):
    """Gradients of a plain unrolled loop that is long enough to be exact."""
    x = torch.zeros(p.shape, dtype=p.dtype)
    for _ in range(200):
        x = module(x, p)
    return torch.autograd.grad(x.square().sum(), [*module.parameters(), p])


class Cell(nn.Module):
    """A contraction with parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(N, N).double()
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, x, p):
        """The next state."""
        return torch.tanh(self.linear(x) + p)


@pytest.mark.parametrize("listed", [False, True])
def test_module_parameters(tensors, listed):
    """Parameters of a module receive their gradients, listed or not."""
    p, cell = tensors[2], Cell()
    x, _ = scrimp.fixed_point(
        cell, torch.zeros(p.shape, dtype=p.dtype), p, params=cell if listed else None, batch_dims=1
    )
    found = torch.autograd.grad(x.square().sum(), [*cell.parameters(), p])
    for ours, theirs in zip(found, reference_gradients(cell, p), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_listed_pytree_is_passed_to_f(tensors):
    """A pytree given as params reaches f by that name."""
    W, b, p = tensors
    x, _ = scrimp.fixed_point(
        lambda x, p, params: torch.tanh(x @ params["W"] + params["b"] + p),
        torch.zeros(p.shape, dtype=p.dtype), p, params={"W": W, "b": b}, batch_dims=1, rtol=1e-13,
    )  # fmt: skip
    torch.testing.assert_close(x, solve(W, b, p))


def test_checkpointed_function(tensors):
    """F may recompute itself under torch's checkpoint."""
    p, cell = tensors[2], Cell()
    x, _ = scrimp.fixed_point(
        lambda x: checkpoint(cell, x, p, use_reentrant=False),
        torch.zeros(p.shape, dtype=p.dtype),
        batch_dims=1,
    )
    found = torch.autograd.grad(x.square().sum(), [*cell.parameters(), p])
    for ours, theirs in zip(found, reference_gradients(cell, p), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_nothing_that_requires_grad_means_no_graph():
    """A solution that depends on no tensor with requires_grad has none either."""
    x, _ = scrimp.fixed_point(lambda x: torch.cos(x), torch.ones(()))
    assert not x.requires_grad


def test_x0_receives_no_gradient():
    """The solution does not depend on where the search began."""
    x0 = torch.ones((), requires_grad=True)
    x, _ = scrimp.fixed_point(lambda x: torch.cos(x), x0)
    assert not x.requires_grad


def test_backward_leaves_no_gradient_on_inner_tensors(tensors):
    """``backward()`` fills the leaves' ``grad`` once, with the right value."""
    W, b, p = tensors
    solve(W, b, p).sum().backward()
    expected = torch.autograd.grad(solve(W, b, p).sum(), (W, b, p))
    for leaf, value in zip((W, b, p), expected, strict=True):
        torch.testing.assert_close(leaf.grad, value)


def test_backward_twice_with_retain_graph(tensors):
    """A retained graph gives the same gradient again."""
    x = solve(*tensors)
    first = torch.autograd.grad(x.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(x.sum(), tensors)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_hooks_fire_once_with_the_right_gradient(tensors):
    """Hooks on the solution, on arguments and on parameters fire once a backward, as for any operator."""
    p, cell = tensors[2], Cell()
    x, _ = scrimp.fixed_point(cell, torch.zeros(p.shape, dtype=p.dtype), p, batch_dims=1)
    seen = []
    x.register_hook(lambda g: seen.append(("x", g.clone())))
    p.register_hook(lambda g: seen.append(("p", g.clone())))
    for name, parameter in cell.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda t, name=name: seen.append((name, t.grad.clone())))
    x.sum().backward()
    assert sorted(name for name, _ in seen) == ["linear.bias", "linear.weight", "p", "x"]
    gradients = dict(seen)
    assert torch.equal(gradients["x"], torch.ones_like(x))
    assert torch.equal(gradients["p"], p.grad)


def test_pytree_state_with_complex_leaf():
    """A state may be a dict of tensors of several shapes, one of them complex."""
    a = torch.tensor([0.3, 0.2], dtype=torch.float64, requires_grad=True)

    def solution(a):
        def f(state):
            z, y = state["z"], state["y"]
            return {
                "z": torch.exp(1j * y[0]) * a[0] + 0.1 * z,
                "y": torch.stack([z.real * a[1], y[0].cos() * 0.3]),
            }

        x0 = {"z": torch.zeros((), dtype=torch.complex128), "y": torch.zeros(2, dtype=torch.float64)}
        x, info = scrimp.fixed_point(f, x0, rtol=1e-13)
        assert info.all_converged
        return torch.cat([torch.view_as_real(x["z"]), x["y"]])

    assert torch.autograd.gradcheck(solution, (a,))
