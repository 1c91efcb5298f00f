"""Memory does not grow with the number of steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import scrimp
from scrimp._implicit.problem import FIXED_POINT
from scrimp._implicit.state import layout_of
from scrimp._implicit.steppers import AutoStepper
from scrimp.adjoints import Implicit, JacobianFree, Phantom
from scrimp.solvers import GMRES, Anderson, BiCGSTAB, Broyden, Neumann, Picard
from scrimp.testing import live_bytes


class Block(nn.Module):
    """A residual block four times wider inside than its state, and a contraction."""

    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x, p):
        """The next state."""
        return torch.tanh(p + 0.3 * self.narrow(torch.nn.functional.gelu(self.wide(x))))


def solver_peak(steps: int, solver, adjoint) -> int:
    """Peak bytes of forward and backward with exactly this many steps of a map without a fixed point."""
    block, p = Block(128), torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    drift = torch.linspace(0.5, 1.0, 128)
    options = {"batch_dims": 1, "solver": solver, "adjoint": adjoint, "on_fail": "ignore", "max_steps": steps}
    with live_bytes() as memory:
        x, info = scrimp.fixed_point(lambda x: x + block(x, p) + 2 * drift, torch.zeros(64, 128), **options)
        assert int(info.steps.max()) == steps
        x.square().sum().backward()
    return memory.peak


SAMPLES, UNKNOWNS = 2, 20_000
STATE = SAMPLES * UNKNOWNS * 4


@pytest.mark.parametrize(
    ("solver", "states"),
    [
        (Picard(), 6),
        (Anderson(8), 2 * 8 + 7),
        (Anderson(16), 2 * 16 + 7),
        (Broyden(8), 2 * 8 + 10),
        (Broyden(16), 2 * 16 + 10),
    ],
)
def test_forward_holds_the_states_that_are_documented(solver, states):
    """While solving, a solver holds so many tensors of the state's size, what f returns included, and hardly more."""
    drift, x0 = torch.linspace(0.5, 1.0, UNKNOWNS), torch.zeros(SAMPLES, UNKNOWNS)
    with live_bytes() as memory, torch.no_grad():
        scrimp.fixed_point(lambda x: x + drift, x0, batch_dims=1, solver=solver, on_fail="ignore", max_steps=60)
    assert states * STATE <= memory.peak < (states + 0.1) * STATE


@pytest.mark.parametrize(
    ("adjoint", "states"),
    [
        (Implicit(GMRES(8, 40)), 8 + 9),
        (Implicit(GMRES(16, 40)), 16 + 8),
        (Implicit(BiCGSTAB(80)), 11),
        (Implicit(Anderson(4)), 2 * 4 + 7),
        (Implicit(Anderson(8)), 2 * 8 + 7),
        (Implicit(Neumann(20)), 4),
        (Phantom(5), 4),
        (JacobianFree(), 4),
    ],
)
def test_backward_holds_the_states_that_are_documented(adjoint, states):
    """Backward holds so many tensors of the state's size besides the graph, and hardly more."""
    slopes = torch.linspace(-0.9, 0.99, UNKNOWNS)
    c = torch.zeros(SAMPLES, UNKNOWNS, requires_grad=True)
    options = {"batch_dims": 1, "adjoint": adjoint, "rtol": 1e-5, "on_fail": "ignore"}
    x, _ = scrimp.fixed_point(lambda x: slopes * x + c, torch.ones(SAMPLES, UNKNOWNS), **options)
    with live_bytes() as memory:
        x.sum().backward()
    assert states * STATE <= memory.peak < (states + 0.1) * STATE


def test_auto_lets_go_of_one_method_before_it_takes_the_next():
    """Where Anderson's steps are stuck their history is gone before Broyden's takes twice as much."""
    x = torch.zeros(SAMPLES, UNKNOWNS)
    stepper = AutoStepper(FIXED_POINT.equation(torch.cos, layout_of(x, 1)), x, 8)
    with live_bytes() as memory:
        stepper._accelerate(1.0)
        assert memory.now >= 2 * 8 * STATE
        stepper._escalate()
    assert memory.peak < (4 * 8 + 0.1) * STATE


def unrolled_peak(steps: int) -> int:
    """Peak bytes of forward and backward through a plain loop."""
    block, p = Block(32), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    with live_bytes() as memory:
        x = torch.zeros(64, 32)
        for _ in range(steps):
            x = block(x, p)
        x.square().sum().backward()
    return memory.peak


@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_peak_is_flat_from_ten_to_a_hundred_steps(solver):
    """Ten times the steps take at most five per cent more memory, whatever the solver."""
    adjoint = Implicit(BiCGSTAB(max_products=20))
    assert solver_peak(100, solver, adjoint) <= 1.05 * solver_peak(10, solver, adjoint)


def test_peak_is_a_quarter_of_an_unrolled_loop():
    """The default solver and adjoint need at most a quarter of thirty recorded steps."""
    block, p = Block(32), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    with live_bytes() as memory:
        x, info = scrimp.fixed_point(block, torch.zeros(64, 32), p, batch_dims=1)
        x.square().sum().backward()
    assert info.all_converged
    assert memory.peak <= 0.25 * unrolled_peak(30)


def left_after_backward(make) -> int:
    """Bytes that live on when a result is dropped after its backward."""
    block, p = Block(32), torch.randn(64, 32)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with live_bytes() as memory:
        x = make(block, p)
        x.square().sum().backward()
        del x
        return memory.now


def test_nothing_stays_after_backward():
    """When the solution is dropped after backward, no more stays than after one evaluation of f."""
    ours = left_after_backward(lambda f, p: scrimp.fixed_point(f, torch.zeros(64, 32), p, batch_dims=1)[0])
    assert ours == left_after_backward(lambda f, p: f(torch.zeros(64, 32), p))
