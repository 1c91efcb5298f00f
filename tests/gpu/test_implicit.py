"""Fixed points, roots and minima whose state lies on a CUDA device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import scrimp
from scrimp.adjoints import Implicit, JacobianFree, Phantom, Reversible, Unroll
from scrimp.errors import ConvergenceWarning, GradientWarning
from scrimp.policy import KeepNone
from scrimp.solvers import GMRES, Anderson, BiCGSTAB, Broyden, Dense, NewtonKrylov, Picard, WarmStart

DOUBLE = torch.float64


def problem(dtype=DOUBLE, device="cuda"):
    """W and p of a contraction, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(24, 24, generator=generator, dtype=DOUBLE) * 0.15
    p = torch.randn(6, 24, generator=generator, dtype=DOUBLE)
    return W.to(device, dtype).requires_grad_(), p.to(device, dtype).requires_grad_()


def f(x, W, p):
    """A contraction."""
    return torch.tanh(x @ W + p)


def gradients(W, p, **options):
    """The solution, its record, and the gradients of the sum of its squares."""
    x, info = scrimp.fixed_point(f, torch.zeros_like(p), W, p, batch_dims=1, **options)
    return x, info, torch.autograd.grad(x.square().sum(), (W, p))


@pytest.mark.parametrize("solver", [None, Picard(), Anderson(), Broyden(), NewtonKrylov()])
@pytest.mark.parametrize("adjoint", [Implicit(), Implicit(GMRES(5)), Implicit(BiCGSTAB()), Implicit(Dense())])
def test_solutions_and_gradients_are_those_of_the_cpu(solver, adjoint):
    """Every solver and exact adjoint finds on the device what the default finds on the CPU."""
    options = {"adjoint": adjoint} if solver is None else {"adjoint": adjoint, "solver": solver}
    x, info, found = gradients(*problem(), **options)
    x_cpu, _, expected = gradients(*problem(device="cpu"))
    assert x.is_cuda
    assert info.converged.is_cuda
    assert info.all_converged
    torch.testing.assert_close(x.cpu(), x_cpu, rtol=1e-8, atol=1e-9)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("adjoint", [Phantom(), JacobianFree(), Unroll(), Reversible(0.5)])
def test_other_adjoints_are_those_of_the_cpu(adjoint):
    """Approximate, unrolled and reversed derivatives are on the device what they are on the CPU."""
    options = {"solver": Picard()} if isinstance(adjoint, Unroll) else {}

    def solve(device):
        # Reversible steps can be undone only where the contraction is strong.
        W, p = problem(device=device)
        weak = (W.detach() / 4).requires_grad_()
        return gradients(weak, p, adjoint=adjoint, rtol=1e-5, **options)[2]

    for ours, theirs in zip(solve("cuda"), solve("cpu"), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


def test_large_state_in_single_precision():
    """States wide enough for the choice between plain and accelerated steps are solved as on the CPU."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(512, 512, generator=generator) / 512**0.5 * 0.6
    p = torch.randn(16, 512, generator=generator) * 0.1

    def solve(device):
        return gradients(W.to(device).requires_grad_(), p.to(device).requires_grad_())

    x, info, found = solve("cuda")
    x_cpu, _, expected = solve("cpu")
    assert info.all_converged
    torch.testing.assert_close(x.cpu(), x_cpu, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 1e-4


def test_start_on_another_device_is_refused():
    """A start on the CPU for a map on the device is an error that says what to do."""
    W, p = problem()
    with pytest.raises((ValueError, RuntimeError), match="device"):
        scrimp.fixed_point(lambda x: f(x.to("cuda"), W, p), torch.zeros(6, 24, dtype=DOUBLE), batch_dims=1)


def test_module_and_closure_on_the_device():
    """Parameters of a module that f closes over receive their gradients, and x0 none."""
    torch.manual_seed(0)
    cell = nn.Linear(8, 8).cuda()
    with torch.no_grad():
        cell.weight.mul_(0.4)
    x0 = torch.zeros(3, 8, device="cuda", requires_grad=True)
    x, info = scrimp.fixed_point(lambda x: torch.tanh(cell(x) + 0.1), x0, batch_dims=1)
    x.sum().backward()
    assert info.all_converged
    assert cell.weight.grad.is_cuda
    assert x0.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Under autocast f computes in half precision, the state does not, and the gradient is near."""
    torch.manual_seed(0)
    cell = nn.Linear(64, 64).cuda()
    with torch.no_grad():
        cell.weight.mul_(0.4)
    seen = set()

    def step(x):
        y = cell(x)
        seen.add((x.dtype, y.dtype))
        return torch.tanh(y)

    with warnings.catch_warnings():
        # Half precision may warn about its gradient, which is not what this is about.
        warnings.simplefilter("ignore", GradientWarning)
        with torch.autocast("cuda", dtype=dtype):
            x, info = scrimp.fixed_point(step, torch.zeros(4, 64, device="cuda"), batch_dims=1)
        x.sum().backward()
    assert seen == {(torch.float32, dtype)}
    assert x.dtype == torch.float32
    assert info.all_converged
    reduced, cell.weight.grad = cell.weight.grad.clone(), None
    scrimp.fixed_point(lambda x: torch.tanh(cell(x)), torch.zeros(4, 64, device="cuda"), batch_dims=1)[
        0
    ].sum().backward()
    assert float((reduced - cell.weight.grad).norm() / cell.weight.grad.norm()) < 0.03


def test_gradcheck_and_second_derivatives():
    """First and second derivatives agree with finite differences on the device."""
    generator = torch.Generator().manual_seed(0)
    W = (torch.randn(3, 3, generator=generator, dtype=DOUBLE) * 0.3).cuda().requires_grad_()
    p = torch.randn(2, 3, generator=generator, dtype=DOUBLE).cuda().requires_grad_()

    def solve(W, p):
        return scrimp.fixed_point(f, torch.zeros_like(p), W, p, batch_dims=1, rtol=1e-13, order=2)[0]

    assert torch.autograd.gradcheck(solve, (W, p))
    assert torch.autograd.gradgradcheck(solve, (W, p))


def test_transforms():
    """Jacobians by torch.func are those of the CPU."""

    def solve(device):
        W, p = (t.detach() for t in problem(device=device))
        one = lambda p: scrimp.fixed_point(f, torch.zeros_like(p), W, p, rtol=1e-12)[0]  # noqa: E731
        return torch.func.vmap(torch.func.jacrev(one))(p)

    torch.testing.assert_close(solve("cuda").cpu(), solve("cpu"), rtol=1e-8, atol=1e-9)


def test_root_argmin_and_implicit():
    """Roots, minima and given solutions have their derivatives on the device."""
    a = torch.tensor([8.0, 27.0], dtype=DOUBLE, device="cuda", requires_grad=True)
    expected = torch.tensor([1 / 12, 1 / 27], dtype=DOUBLE, device="cuda")
    x, _ = scrimp.root(lambda x, a: x**3 - a, torch.ones_like(a), a, batch_dims=1)
    y, _ = scrimp.argmin(lambda x, a: x**4 / 4 - a * x, torch.ones_like(a), a, batch_dims=1)
    z, _ = scrimp.implicit(x.detach(), lambda x, a: x**3 - a, a, batch_dims=1)
    for solution in (x, y, z):
        torch.testing.assert_close(torch.autograd.grad(solution.sum(), a)[0], expected)


def test_bad_sample_is_named_and_does_not_spoil_the_others():
    """A NaN sample is warned about; the others have the values of a batch without it."""
    c = torch.linspace(0.1, 0.5, 4, dtype=DOUBLE, device="cuda").unsqueeze(1).repeat(1, 5)
    bad = c.clone()
    bad[1] = torch.nan
    solve = lambda c: scrimp.fixed_point(lambda x: torch.tanh(0.5 * x + c), torch.zeros_like(c), batch_dims=1)  # noqa: E731
    x, _ = solve(c)
    with pytest.warns(ConvergenceWarning, match=r"1 of 4 samples \(1\)"):
        x_bad, info = solve(bad)
    assert info.converged.tolist() == [True, False, True, True]
    keep = [0, 2, 3]
    torch.testing.assert_close(x_bad[keep], x[keep], rtol=1e-12, atol=0)


def test_near_singular_is_solved_or_warned_about():
    """An eigenvalue next to one is right or reported in single precision."""
    matrix = torch.diag(torch.tensor([1 - 1e-6, 0.5, -0.3], device="cuda"))
    c = torch.ones(3, device="cuda", requires_grad=True)
    with pytest.warns((ConvergenceWarning, GradientWarning)):
        scrimp.fixed_point(lambda x: matrix @ x + c, torch.zeros(3, device="cuda"))[0].sum().backward()


def test_session_and_warm_start():
    """Inside a session that keeps nothing the bits are the same, and a warm start saves the steps."""
    _, _, plain = gradients(*problem())
    W, p = problem()
    with scrimp.session(KeepNone()):
        x, _ = scrimp.fixed_point(f, torch.zeros_like(p), W, p, batch_dims=1)
        loss = x.square().sum()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, (W, p)), plain, strict=True))
    warm = WarmStart()
    for _ in range(2):
        _, info, _ = gradients(W, p, warm=warm)
    assert int(info.steps.max()) <= 1


def test_memory_does_not_grow_with_the_steps():
    """Ten times the steps have the same allocated peak within five per cent."""
    W = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 0.01

    def peak(steps):
        weight = W.clone().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        drifting = lambda x: x + 1 + torch.tanh(x @ weight)  # noqa: E731
        x, _ = scrimp.fixed_point(
            drifting, torch.zeros(256, 512, device="cuda"), batch_dims=1, solver=Anderson(), max_steps=steps,
            adjoint=Implicit(BiCGSTAB(max_products=20)), on_fail="ignore",
        )  # fmt: skip
        x.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(10)
    assert peak(100) <= 1.05 * peak(10)
