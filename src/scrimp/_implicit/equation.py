"""The equation to solve, as a residual on flat states, with its evaluations counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .state import Layout

Residual = Callable[[Tensor], Tensor]
RowNorm = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Counts:
    """What solving has cost so far."""

    evaluations: int = 0
    vjps: int = 0
    jvps: int = 0


@dataclass(frozen=True, slots=True)
class Equation:
    """``residual(x) = 0`` for a flat state ``x`` of one row for each sample.

    A fixed point of f has the residual f(x) − x, so its residual is also the plain iteration's step.

    Attributes:
        function: f for a fixed point, else the residual. Differentiable; runs under the autocast state in which the
            user called.
        layout: How the user's state becomes the flat one.
        is_fixed_point: Whether x + residual(x) is a state in its own right.
        symmetric: Whether the residual's Jacobian is symmetric (gradients of a loss).
        merit: What has to go down along a step, one number a sample; None for the residual's norm.
        counts: Incremented by every evaluation.
    """

    function: Residual
    layout: Layout
    is_fixed_point: bool
    symmetric: bool = False
    merit: Callable[[Tensor], Tensor] | None = None
    counts: Counts = field(default_factory=Counts)

    def residual(self, x: Tensor) -> Tensor:
        """What is zero at a solution."""
        value = self.function(x)
        return value - x if self.is_fixed_point else value

    def evaluate(self, x: Tensor) -> Tensor:
        """The residual at x, without a graph; raises if f writes into x, which would pass for a solution."""
        with torch.no_grad():
            if x.is_inference():  # such a tensor does not count who writes to it
                value = self.function(x.clone())
                return value - x if self.is_fixed_point else value
            before = x._version
            residual = self.residual(x)
        if x._version != before:
            raise ValueError(
                "f must not write into the state that it is given: need a new tensor; clone it there first"
            )
        return residual


class Linearisation:
    """Products with A, minus the residual's Jacobian at one state, from one recorded evaluation.

    Holds the graph of that evaluation, nothing else; every product walks it again. For a fixed point A is 1 − J, where
    J is f's Jacobian; the 1 needs no graph.
    """

    def __init__(self, equation: Equation, x: Tensor) -> None:
        self._counts = equation.counts
        self._is_fixed_point, self._symmetric = equation.is_fixed_point, equation.symmetric
        with torch.enable_grad():
            # The derivative stops at this boundary: walking the graph further never leaves a gradient on x.
            self._anchor = torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True)
            inside: Tensor = Boundary.apply(x.detach(), self._anchor)  # type: ignore[no-untyped-call]
            self._value = equation.function(inside)
            self.residual = self._value - inside if self._is_fixed_point else self._value
            self._inside = torch.autograd.graph.get_gradient_edge(inside)

    def depends_on_others(self) -> bool:
        """Whether anything but the state, a parameter or an argument, can receive a gradient."""
        seen: set[torch.autograd.graph.Node] = set()
        pending = [self.residual.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and node.variable is not self._anchor:
                return True
            pending.extend(following for following, _ in node.next_functions)
        return False

    def transposed(self, v: Tensor) -> Tensor:
        """Rows of vᵀ·A."""
        self._counts.vjps += 1
        return self._system(v, self._pull(v, create_graph=False))

    def forward(self, w: Tensor) -> Tensor:
        """A·w, by differentiating the transposed product, which is linear in its vector."""
        if self._symmetric:
            return self.transposed(w)
        self._counts.jvps += 1
        with torch.enable_grad():
            v = torch.zeros_like(w, requires_grad=True)
            pulled = self._pull(v, create_graph=True)
            pushed = None
            if pulled is not None and pulled.requires_grad:
                (pushed,) = torch.autograd.grad(pulled, v, w, allow_unused=True)
        return self._system(w, pushed)

    def _system(self, v: Tensor, product: Tensor | None) -> Tensor:
        """A·v, given the product with the Jacobian of the function alone; None for zero."""
        if product is None:
            return v.clone() if self._is_fixed_point else torch.zeros_like(v)
        return v - product if self._is_fixed_point else -product

    def _pull(self, v: Tensor, *, create_graph: bool) -> Tensor | None:
        if not self._value.requires_grad:
            return None
        (pulled,) = torch.autograd.grad(
            self._value, self._inside, v, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return pulled


class Boundary(torch.autograd.Function):
    """The identity, through which no derivative passes; it requires grad, and so can be differentiated to."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, anchor: Tensor) -> Tensor:
        """Give x back."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, None]:
        """Stop."""
        return None, None


def ambient_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A factory of contexts that bring back the autocast state of now, for one device type.

    Entering ``torch.autocast`` costs as much as a small evaluation, so it is spared where there is none to change.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind):  # a device of descriptions, say
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def context() -> AbstractContextManager[object]:
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype=dtype, enabled=enabled)

    return context


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context for a solver's own arithmetic, which must keep the precision of the state."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
