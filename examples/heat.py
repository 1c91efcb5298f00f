"""How conductive is a rod? Nonlinear heat conduction, solved by ``scrimp.root``, fitted to a measurement.

The temperature u of a rod that is heated along its length and held at zero at both ends satisfies

    d/ds ( k(u) du/ds ) + q(s) = 0,   k(u) = a + b u².

From a temperature profile that was measured, a and b are found by gradients through the solution.

    python examples/heat.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import scrimp

CELLS = 64
STEP = 1 / CELLS
HEAT = 8 * torch.linspace(0, 1, CELLS - 1, dtype=torch.float64).mul(torch.pi).sin() + 2


def imbalance(u: Tensor, constants: Tensor) -> Tensor:
    """Heat that flows into each cell, plus what is made there, scaled by the cell's size."""
    a, b = constants
    ends = torch.zeros(1, dtype=u.dtype)
    u = torch.cat([ends, u, ends])
    middle = (u[1:] + u[:-1]) / 2
    flow = (a + b * middle**2) * (u[1:] - u[:-1])
    return flow[1:] - flow[:-1] + STEP**2 * HEAT


def temperature(constants: Tensor, warm: scrimp.solvers.WarmStart) -> Tensor:
    """The steady temperature, differentiable in the constants; starts from the last one."""
    u, _ = scrimp.root(imbalance, torch.zeros(CELLS - 1, dtype=torch.float64), constants, warm=warm, on_fail="raise")
    return u


def main() -> None:
    truth = torch.tensor([1.0, 0.5], dtype=torch.float64)
    measured = temperature(truth, scrimp.solvers.WarmStart())
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    warm = scrimp.solvers.WarmStart()
    optimizer = torch.optim.LBFGS([logs], max_iter=40, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (temperature(logs.exp(), warm) - measured).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = logs.detach().exp()
    worst = (temperature(found, warm) - measured).abs().max()
    a, b = found.tolist()
    print(f"A rod of {CELLS} cells, up to {measured.max():.2f} degrees warm; its conductivity is a + b u²:")
    print(f"started at a = 1, b = 1; found a = {a:.4f} (true 1), b = {b:.4f} (true 0.5)")
    print(f"the temperatures that follow differ from the measured ones by {worst:.0e} degrees at most")


if __name__ == "__main__":
    main()
