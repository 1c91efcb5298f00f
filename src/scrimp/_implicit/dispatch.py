"""From a call to the way in which it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import AdjointError
from .adjoints import Implicit, JacobianFree, Phantom, Reversible, Unroll
from .backward import judge_steps
from .equation import Equation, Linearisation, no_autocast
from .iterate import Solution
from .problem import Function, Kind, Params, computing_eps, explicit
from .report import report_solution
from .results import Info
from .settings import Settings
from .solve import adjoint_solve, conclude, differentiable, find, record
from .solvers import Picard, Solver
from .state import Layout, Tree, layout_of
from .tolerance import Tolerance, euclidean
from .transforms import Call, Leaves, is_transformed, refuse_hidden, solve_transformed
from .unrolled import Carried, LeafMap, reversible, unroll


def run(
    kind: Kind,
    f: Function,
    x0: Tree,
    args: tuple[Tree, ...],
    params: Params,
    solver: Solver,
    batch_dims: int,
    settings: Settings,
) -> tuple[Tree, Info]:
    """Solve, and give the solution the derivative that was asked for."""
    if isinstance(solver, type) or not hasattr(solver, "stepper"):
        raise TypeError(f"solver must be one of scrimp.solvers, such as Anderson() or Picard(); have {solver!r}")
    layout = layout_of(x0, batch_dims)
    function, listed = explicit(f, params)
    inputs = _Inputs((x0, listed, args))
    tolerance = settings.tolerance(computing_eps(layout))
    if is_transformed(inputs.tensors):
        return _run_transformed(kind, function, x0, inputs, layout, solver, tolerance, settings)
    equation = kind.equation(lambda x: function(x, listed, *args), layout)
    match settings.adjoint:
        case Unroll(with_checkpoints):
            return _run_unrolled(equation, x0, solver, with_checkpoints, tolerance, settings)
        case Reversible(coupling):
            if not equation.is_fixed_point:
                raise AdjointError("Reversible steps need a fixed point; use adjoint=Implicit() for roots and minima")
            leaves = _Inputs((listed, args))

            def of_leaves(x: Tensor, tensors: Leaves) -> Tensor:
                some_listed, some_args = leaves.rebuilt(tensors)
                return layout.flat(function(layout.tree(x), some_listed, *some_args))

            return _run_reversible(equation, of_leaves, leaves, x0, coupling, tolerance, settings)
        case _:
            found = find(equation, x0, solver, tolerance, settings)
            return differentiable(equation, found, tolerance, settings)


class _Inputs:
    """The floating-point tensors in a pytree, and how to put others in their places."""

    def __init__(self, tree: Tree) -> None:
        self._all, self._structure = pytree.tree_flatten(tree)
        self._places = [
            place
            for place, leaf in enumerate(self._all)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self._all[place] for place in self._places]

    def rebuilt(self, tensors: Leaves) -> Tree:
        """The pytree with these tensors."""
        leaves = list(self._all)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._structure)


def _run_transformed(
    kind: Kind,
    function: Function,
    x0: Tree,
    inputs: _Inputs,
    layout: Layout,
    solver: Solver,
    tolerance: Tolerance,
    settings: Settings,
) -> tuple[Tree, Info]:
    if not isinstance(settings.adjoint, Implicit | Phantom | JacobianFree):
        raise AdjointError(f"under transforms of torch.func the adjoint must be Implicit; have {settings.adjoint}")
    if settings.warm is not None:
        raise AdjointError("a warm start cannot be kept under transforms of torch.func; call without warm")

    def equation_at(call: Call, leaves: Leaves) -> Equation:
        return kind.equation(lambda state: call.function(state, leaves), call.layout)

    def solve(call: Call, leaves: Leaves) -> tuple[Tensor, Info]:
        equation = equation_at(call, leaves)
        with torch.no_grad():
            found = find(equation, call.start(leaves), solver, tolerance, settings)
            x, _, info = conclude(equation, found, tolerance, settings)
        return x, info

    def solve_linear(call: Call, leaves: Leaves, x: Tensor, rhs: Tensor, transposed: bool) -> Tensor:
        equation = equation_at(call, tuple(leaf.detach() for leaf in leaves))
        at = Linearisation(equation, x)
        return adjoint_solve(equation, at, x, euclidean(x), call.log[-1], tolerance, settings)(rhs, transposed)

    def of_leaves(state: Tree, leaves: Leaves) -> Tree:
        _, listed, args = inputs.rebuilt(leaves)
        return function(state, listed, *args)

    refuse_hidden(of_leaves, x0, tuple(inputs.tensors))
    call = Call(of_leaves, lambda leaves: inputs.rebuilt(leaves)[0], kind.residual, solve, solve_linear, layout, [])
    x = solve_transformed(call, tuple(inputs.tensors))
    return layout.tree(x), call.log[-1]


def _run_unrolled(
    equation: Equation,
    x0: Tree,
    solver: Solver,
    with_checkpoints: bool,
    tolerance: Tolerance,
    settings: Settings,
) -> tuple[Tree, Info]:
    if not isinstance(solver, Picard):
        raise AdjointError(f"only plain steps can be unrolled: need solver=Picard(), have {solver}")
    layout = equation.layout
    found = find(equation, x0, solver, tolerance, settings)
    # A start that is solved already has a derivative all the same, or at least a part of it.
    steps = max(1, int(found.steps.max())) if found.steps.numel() else 0
    watch = _Watch(layout, settings)
    start = layout.flat(x0, "x0").detach()
    x = unroll(equation, start, solver.damping, steps, with_checkpoints, watch.after(steps))
    return _reported(equation, x, found, tolerance, settings, watch)


def _run_reversible(
    equation: Equation,
    of_leaves: LeafMap,
    leaves: _Inputs,
    x0: Tree,
    coupling: float,
    tolerance: Tolerance,
    settings: Settings,
) -> tuple[Tree, Info]:
    start = equation.layout.flat(x0, "x0").detach()
    with torch.enable_grad():
        if of_leaves(start, tuple(leaf.detach() for leaf in leaves.tensors)).requires_grad:
            raise AdjointError(
                "Reversible() must be told what f depends on: f closes over tensors that require grad; "
                "give them as args or params, or use adjoint=Implicit()"
            )
    watch = _Watch(equation.layout, settings)
    tensors = tuple(leaves.tensors)
    x, found = reversible(equation, of_leaves, tensors, start, coupling, tolerance, settings, watch.after)
    return _reported(equation, x, found, tolerance, settings, watch)


@dataclass(slots=True)
class _Watch:
    """Judges each backward through steps, once the record of the solve is there to note it in."""

    layout: Layout
    settings: Settings
    info: Info | None = None

    def after(self, steps: int) -> Carried:
        """What to call with the gradient's length and what so many steps left of it."""

        def judge(length: Tensor, left: Tensor) -> None:
            adjoint = self.settings.adjoint
            assert self.info is not None
            assert isinstance(adjoint, Unroll | Reversible)
            judge_steps(length, left, steps, self.info, adjoint, self.layout, self.settings.on_fail)

        return judge


def _reported(
    equation: Equation, x: Tensor, found: Solution, tolerance: Tolerance, settings: Settings, watch: _Watch
) -> tuple[Tree, Info]:
    """A solution that carries its own graph, re-checked."""
    with no_autocast(x.device):
        residual = equation.evaluate(x.detach())
    info = watch.info = record(equation, found, x.detach(), residual, tolerance)
    report_solution(info, equation.layout, settings.on_fail, settings.max_steps)
    return equation.layout.tree(x), info
