"""Derivatives through the steps themselves: recorded, checkpointed, or reversed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import AdjointError
from .draws import drawing_reported
from .equation import Equation, Linearisation, no_autocast
from .iterate import Solution, scale_of, start_scale
from .settings import Settings
from .tolerance import Tolerance, euclidean

Carried = Callable[[Tensor, Tensor], None]
"""Hears how long a gradient was for each sample, and what the first step would pass on: what steps did not carry."""

LeafMap = Callable[[Tensor, tuple[Tensor, ...]], Tensor]
"""f on flat states, with the tensors it depends on."""

# Reconstructed states may lose this much of a gradient to rounding.
LARGEST_LOSS = 1e-3


def unroll(
    equation: Equation, start: Tensor, damping: float, steps: int, with_checkpoints: bool, carried: Carried
) -> Tensor:
    """The state after so many plain steps, with the graph of all, each recomputed in backward or not."""

    def step(x: Tensor) -> Tensor:
        return x + damping * equation.residual(x)

    x, remainder = start, _Remainder(equation, start, damping, carried)
    for index in range(steps):
        x = checkpoint(step, x, use_reentrant=False) if with_checkpoints else step(x)
        if x.requires_grad:
            x.register_hook(remainder.last if index == 0 else remainder.next)
    return x


@dataclass(slots=True)
class _Remainder:
    """Watches a backward: the largest gradient that a step was given, and what the first step would pass on."""

    equation: Equation
    start: Tensor
    damping: float
    carried: Carried
    largest: Tensor | None = None

    def next(self, gradient: Tensor) -> None:
        """Hear of the gradient of a step."""
        length = euclidean(gradient.detach())
        self.largest = length if self.largest is None else torch.maximum(self.largest, length)

    def last(self, gradient: Tensor) -> None:
        """Hear of the gradient of the first step, which backward comes to last."""
        self.next(gradient)
        largest, self.largest = self.largest, None
        assert largest is not None
        with torch.no_grad(), no_autocast(gradient.device):
            pulled = Linearisation(self.equation, self.start).transposed(gradient.detach())
            self.carried(largest, gradient.detach() - self.damping * pulled)


def allowed_steps(coupling: float, dtype: torch.dtype) -> int:
    """How many reversible steps may be reconstructed before rounding, grown by each, spoils the gradient."""
    budget, steps = LARGEST_LOSS / torch.finfo(dtype).eps, 0
    while (1 - coupling) ** (-2 * (steps + 1)) <= budget:
        steps += 1
    return steps


def reversible(
    equation: Equation,
    map_with: LeafMap,
    leaves: tuple[Tensor, ...],
    start: Tensor,
    coupling: float,
    tolerance: Tolerance,
    settings: Settings,
    carried: Callable[[int], Carried],
) -> tuple[Tensor, Solution]:
    """Run the coupled iteration y ← (1−β)y + βf(z), z ← (1−β)z + βf(y) until f(z) is near z."""
    with torch.no_grad(), no_autocast(start.device):
        limit = allowed_steps(coupling, start.dtype)
        with drawing_reported(start.device, settings.on_fail):
            steps, y, solution = _run(equation, start, coupling, tolerance, settings, limit)
    last = _Reversible.apply(map_with, carried(steps), y, solution.x, coupling, steps, *leaves)  # type: ignore[no-untyped-call]
    return last, solution


def _run(
    equation: Equation, start: Tensor, coupling: float, tolerance: Tolerance, settings: Settings, limit: int
) -> tuple[int, Tensor, Solution]:
    y = z = start
    r = equation.evaluate(z)
    norm = tolerance.norm(r)
    scale = start_scale(equation, z, r, tolerance)
    history, steps = [norm], 0
    taken = torch.zeros_like(norm, dtype=torch.long)
    while steps < settings.max_steps:
        unsolved = norm > tolerance.bound(scale_of(equation, z, r, scale, tolerance), scale)
        if not bool(unsolved.any()):
            break
        if steps == limit:
            raise AdjointError(
                f"cannot undo so many steps: need (1 − coupling)^(−2 · steps) · eps ≤ {LARGEST_LOSS:.0e}, "
                f"which in {start.dtype} allows {limit} steps at coupling {coupling}, have more to take; "
                "use a smaller coupling, double precision, a looser rtol, or adjoint=Implicit()"
            )
        y = y + coupling * (z + r - y)
        z = z + coupling * (y + equation.evaluate(y) - z)
        r = equation.evaluate(z)
        norm = tolerance.norm(r)
        history.append(norm)
        taken += unsolved
        steps += 1
    evaluations = torch.full_like(taken, equation.counts.evaluations)
    never = torch.zeros_like(norm, dtype=torch.bool)
    return steps, y, Solution(z, z, never, scale, taken, evaluations, torch.stack(history), norm * 0)


class _Reversible(torch.autograd.Function):
    """The coupled iteration as one node, which holds its last two states and what f depends on."""

    @staticmethod
    def forward(
        ctx: Any, f: LeafMap, carried: Carried, y: Tensor, z: Tensor, beta: float, steps: int, *leaves: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y, z, *leaves)
        ctx.f, ctx.carried, ctx.beta, ctx.steps = f, carried, beta, steps
        return z.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, z, *leaves = ctx.saved_tensors
        f, beta = ctx.f, ctx.beta
        wanted = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        totals = [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in wanted]
        y_bar, z_bar = torch.zeros_like(y), gradients[0]

        def pull(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            """f(x), and v times its Jacobian in x; the share of each leaf goes to its total."""
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                image = f(point, tuple(wanted))
                inputs = [point, *(leaf for leaf in wanted if leaf.requires_grad)]
                pulled = torch.autograd.grad(image, inputs, v, allow_unused=True)
            shares = iter(pulled[1:])
            for total in totals:
                if total is not None and (share := next(shares)) is not None:
                    total += share
            return image.detach(), torch.zeros_like(v) if pulled[0] is None else pulled[0]

        for _ in range(ctx.steps):
            image, back = pull(y, beta * z_bar)
            z = (z - beta * image) / (1 - beta)
            y_bar, z_bar = y_bar + back, (1 - beta) * z_bar
            image, back = pull(z, beta * y_bar)
            y = (y - beta * image) / (1 - beta)
            z_bar, y_bar = z_bar + back, (1 - beta) * y_bar
        # Both halves began at the same state.
        ctx.carried(euclidean(gradients[0]), y_bar + z_bar)
        return None, None, None, None, None, None, *totals
