"""Solutions under ``torch.func``'s transforms and forward-mode differentiation.

There every tensor that the equation depends on must be an input of one operator with rules of its own,
because the search cannot be traced: it looks at numbers. Two operators suffice, the solution and a linear
solve, each with its rules for vjp, jvp and vmap written in terms of both; so all transforms compose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..errors import AdjointError
from .results import Info
from .state import Layout, Tree

Leaves = tuple[Any, ...]
Rule = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, with all that f depends on as explicit leaves.

    Attributes:
        function: f of the state and the leaves.
        start: Where the search begins, given the leaves.
        residual_of: The residual on flat states of f with these leaves, which transforms may differentiate.
        solve: Finds the solution for concrete leaves.
        solve_linear: Solves with the Jacobian at a solution, transposed or not.
        layout: Of the state.
        log: Records of the solves.
    """

    function: Callable[[Tree, Leaves], Tree]
    start: Callable[[Leaves], Tree]
    residual_of: Callable[[Callable[[Tree], Tree], Layout], Callable[[Tensor], Tensor]]
    solve: Callable[[Call, Leaves], tuple[Tensor, Info]]
    solve_linear: Callable[[Call, Leaves, Tensor, Tensor, bool], Tensor]
    layout: Layout
    log: list[Info]

    def residual(self, x: Tensor, leaves: Leaves) -> Tensor:
        """The residual at x."""
        return self.residual_of(lambda state: self.function(state, leaves), self.layout)(x)

    def batched(self, size: int, dims: tuple[int | None, ...]) -> Call:
        """The same call for a batch of leaves: its samples are so many times as many."""
        layout = replace(
            self.layout,
            leaves=tuple(replace(leaf, shape=torch.Size((size, *leaf.shape))) for leaf in self.layout.leaves),
            batch_shape=torch.Size((size, *self.layout.batch_shape)),
        )
        function, start = self.function, self.start

        def every(state: Tree, leaves: Leaves) -> Tree:
            return torch.func.vmap(function, in_dims=(0, dims))(state, leaves)

        def starts(leaves: Leaves) -> Tree:
            return torch.func.vmap(start, in_dims=(dims,))(leaves)

        return replace(self, function=every, start=starts, layout=layout)


def is_transformed(leaves: list[Tensor]) -> bool:
    """Whether a transform of ``torch.func`` is running."""
    if torch._C._are_functorch_transforms_active():
        _refuse_nested_forward_mode()
        return True
    if any(_has_tangent(leaf) for leaf in leaves):
        raise AdjointError("forward mode needs torch.func.jvp or jacfwd; have a tensor of forward_ad.make_dual")
    return False


def _refuse_nested_forward_mode() -> None:
    """Raise inside two forward modes: torch drops the outer tangent in an operator's own jvp rule."""
    functorch = torch._C._functorch
    keys = [interpreter.key() for interpreter in functorch.get_interpreter_stack() or ()]
    if keys.count(functorch.TransformType.Jvp) > 1:
        raise AdjointError(
            "forward mode cannot be nested in forward mode here: have jvp or jacfwd twice; "
            "use reverse mode for one of them, as hessian does: jacfwd(jacrev(f))"
        )


def refuse_hidden(function: Callable[[Tree, Leaves], Tree], state: Tree, leaves: Leaves) -> None:
    """Raise if f depends on a differentiated tensor that is not among the leaves.

    The search runs below the transforms, where such a tensor would pass for a constant, and its derivative
    for zero.
    """
    constants = tuple(_constant(leaf) for leaf in leaves)
    for result in pytree.tree_leaves(function(state, constants)):
        if _has_tangent(result) or _requires_grad_somewhere(result):
            raise AdjointError(
                "f closes over a tensor that is differentiated, which torch.func's transforms cannot follow: "
                "give it as one of args or params, a module as params"
            )


def _constant(tensor: Tensor) -> Tensor:
    """The tensor without its derivatives, forward and reverse."""
    with forward_ad._set_fwd_grad_enabled(False):
        return tensor.detach()


def _has_tangent(tensor: Tensor) -> bool:
    if forward_ad._current_level < 0:
        return False
    # A batch has no tangent of its own, what it holds may have one.
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _requires_grad_somewhere(tensor: Tensor) -> bool:
    """Whether any of the transforms around looks at the tensor, or plain autograd does."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad:
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def solve_transformed(call: Call, leaves: Leaves) -> Tensor:
    """The flat solution, under whatever transforms run."""
    x: Tensor = _Solution.apply(call, *leaves)  # type: ignore[no-untyped-call]
    return x


def _solve_linear(call: Call, transposed: bool, rhs: Tensor, x: Tensor, leaves: Leaves) -> Tensor:
    solution: Tensor = _LinearSolve.apply(call, transposed, rhs, x, *leaves)  # type: ignore[no-untyped-call]
    return solution


class _Solution(torch.autograd.Function):
    """x with residual(x, leaves) = 0."""

    @staticmethod
    def forward(call: Call, *leaves: Any) -> Tensor:
        x, info = call.solve(call, leaves)
        call.log.append(info)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Rule, output: Tensor) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(output, *inputs[1:])
        ctx.save_for_forward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Rule:
        x, *leaves = ctx.saved_tensors
        v = _solve_linear(ctx.call, True, gradients[0], x, tuple(leaves))
        pull = _vjp(lambda *rest: ctx.call.residual(x, rest), *leaves)
        return None, *pull(v)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, *leaves = ctx.saved_tensors
        push = _jvp(lambda *rest: ctx.call.residual(x, rest), tuple(leaves), _filled(tangents[1:], leaves))
        return _solve_linear(ctx.call, False, push, x, tuple(leaves))

    @staticmethod
    def vmap(info: Any, in_dims: Rule, call: Call, *leaves: Any) -> tuple[Tensor, int]:
        samples = call.layout.samples
        x = solve_transformed(call.batched(info.batch_size, in_dims[1:]), leaves)
        return x.reshape(info.batch_size, samples, -1), 0


class _LinearSolve(torch.autograd.Function):
    """A(x, leaves)⁻¹·rhs, or with Aᵀ, where A is minus the residual's Jacobian in x."""

    @staticmethod
    def forward(call: Call, transposed: bool, rhs: Tensor, x: Tensor, *leaves: Any) -> Tensor:
        return call.solve_linear(call, leaves, x, rhs, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Rule, output: Tensor) -> None:
        ctx.call, ctx.transposed = inputs[:2]
        ctx.save_for_backward(output, *inputs[3:])
        ctx.save_for_forward(output, *inputs[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Rule:
        v, x, *leaves = ctx.saved_tensors
        w = _solve_linear(ctx.call, not ctx.transposed, gradients[0], x, tuple(leaves))
        left, right = (v, w) if ctx.transposed else (w, v)

        def form(x: Tensor, *rest: Any) -> Tensor:
            """leftᵀ · Jacobian · right, whose derivative is what A's change adds."""
            return (_pulled(ctx.call, x, rest, left) * right).sum()

        pull = _vjp(form, x, *leaves)
        return None, None, w, *pull(x.new_ones(()))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        v, x, *leaves = ctx.saved_tensors

        def product(x: Tensor, *rest: Any) -> Tensor:
            if ctx.transposed:
                return _pulled(ctx.call, x, rest, v)
            return _jvp(lambda y: ctx.call.residual(y, rest), (x,), (v,))

        at = (x, *leaves)
        change = _jvp(product, at, _filled(tangents[3:], at))
        rhs = change if tangents[2] is None else tangents[2] + change
        return _solve_linear(ctx.call, ctx.transposed, rhs, x, tuple(leaves))

    @staticmethod
    def vmap(
        info: Any, in_dims: Rule, call: Call, transposed: bool, rhs: Tensor, x: Tensor, *leaves: Any
    ) -> tuple[Tensor, int]:
        size, shape = info.batch_size, (call.layout.samples, call.layout.columns)

        def rows(tensor: Tensor, dim: int | None) -> Tensor:
            moved = tensor.expand(size, *shape).clone() if dim is None else tensor.movedim(dim, 0)
            return moved.reshape(size * shape[0], shape[1])

        batched = call.batched(size, in_dims[4:])
        solved = _solve_linear(batched, transposed, rows(rhs, in_dims[2]), rows(x, in_dims[3]), leaves)
        return solved.reshape(size, *shape), 0


def _pulled(call: Call, x: Tensor, leaves: Leaves, v: Tensor) -> Tensor:
    """vᵀ · Jacobian in x."""
    pulled: Tensor = _vjp(lambda y: call.residual(y, leaves), x)(v)[0]
    return pulled


def _vjp(function: Callable[..., Tensor], *primals: Any) -> Callable[[Tensor], tuple[Any, ...]]:
    pull: Callable[[Tensor], tuple[Any, ...]] = torch.func.vjp(function, *primals)[1]
    return pull


def _jvp(function: Callable[..., Tensor], primals: tuple[Any, ...], tangents: tuple[Tensor, ...]) -> Tensor:
    pushed: Tensor = torch.func.jvp(function, primals, tangents)[1]
    return pushed


def _filled(tangents: tuple[Tensor | None, ...], primals: Any) -> tuple[Tensor, ...]:
    pairs = zip(tangents, primals, strict=True)
    return tuple(torch.zeros_like(p) if t is None else t for t, p in pairs)
