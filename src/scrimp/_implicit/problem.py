"""From what the user wrote to an equation: states, parameters, autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .equation import Counts, Equation, ambient_autocast
from .state import Layout, Tree

Function = Callable[..., Tree]
Params = nn.Module | Tree | None


class _Holder(nn.Module):
    """Calls a function that uses a module, so that the module's parameters can be exchanged for the call."""

    def __init__(self, function: Function, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self, *args: Tree) -> Tree:
        return self._function(*args)


def explicit(f: Function, params: Params) -> tuple[Function, Tree]:
    """F as a function of (state, params, *args), and the pytree of its listed parameters."""
    if isinstance(params, nn.Module):
        holder = _Holder(f, params)
        listed = {f"module.{name}": tensor for name, tensor in params.named_parameters()}
        return lambda x, p, *args: functional_call(holder, p, (x, *args)), listed
    if params is None:
        return lambda x, p, *args: f(x, *args), None
    return lambda x, p, *args: f(x, *args, params=p), params


def fixed_point_equation(f: Callable[[Tree], Tree], layout: Layout) -> Equation:
    """f(x) − x = 0."""
    counts = Counts()
    context = ambient_autocast(layout.device)

    def image(x: Tensor) -> Tensor:
        counts.evaluations += 1
        return layout.flat(_call(f, layout.tree(x), context))

    return Equation(image, layout, is_fixed_point=True, counts=counts)


def root_equation(g: Callable[[Tree], Tree], layout: Layout) -> Equation:
    """g(x) = 0."""
    counts = Counts()
    context = ambient_autocast(layout.device)

    def residual(x: Tensor) -> Tensor:
        counts.evaluations += 1
        return layout.flat(_call(g, layout.tree(x), context), "g's result")

    return Equation(residual, layout, is_fixed_point=False, counts=counts)


def argmin_equation(loss: Callable[[Tree], Tensor], layout: Layout) -> Equation:
    """−∇loss(x) = 0, for a loss of one value a sample."""
    counts = Counts()
    context = ambient_autocast(layout.device)

    def value(x: Tensor) -> Tensor:
        values = _call(loss, layout.tree(x), context)
        if not isinstance(values, Tensor) or values.shape != layout.batch_shape:
            have = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the loss must have one value a sample: need shape {tuple(layout.batch_shape)}, "
                f"have {have}; sum over everything but the batch dimensions"
            )
        return values.reshape(layout.samples).to(layout.dtype)

    def residual(x: Tensor) -> Tensor:
        counts.evaluations += 1
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            point = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(value(point).sum(), point, create_graph=create_graph)
        return -gradient

    def merit(x: Tensor) -> Tensor:
        with torch.no_grad():
            return value(x)

    return Equation(residual, layout, is_fixed_point=False, symmetric=True, merit=merit, counts=counts)


def fixed_point_residual(f: Callable[[Tree], Tree], layout: Layout) -> Callable[[Tensor], Tensor]:
    """f(x) − x, for transforms to differentiate."""
    return lambda x: layout.flat(f(layout.tree(x))) - x


def root_residual(g: Callable[[Tree], Tree], layout: Layout) -> Callable[[Tensor], Tensor]:
    """g(x), for transforms to differentiate."""
    return lambda x: layout.flat(g(layout.tree(x)), "g's result")


def argmin_residual(loss: Callable[[Tree], Tensor], layout: Layout) -> Callable[[Tensor], Tensor]:
    """−∇loss(x), for transforms to differentiate."""
    slope = torch.func.grad(lambda x: loss(layout.tree(x)).sum().to(layout.dtype))
    return lambda x: -slope(x)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked of a state: the equation under autograd, and its residual under transforms."""

    equation: Callable[[Callable[[Tree], Tree], Layout], Equation]
    residual: Callable[[Callable[[Tree], Tree], Layout], Callable[[Tensor], Tensor]]


FIXED_POINT = Kind(fixed_point_equation, fixed_point_residual)
ROOT = Kind(root_equation, root_residual)
ARGMIN = Kind(argmin_equation, argmin_residual)


def computing_eps(layout: Layout) -> float:
    """Relative spacing of numbers where f computes: the coarsest of the state's dtypes and autocast's."""
    kind = layout.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return layout.coarsest_eps
    return max(layout.coarsest_eps, torch.finfo(torch.get_autocast_dtype(kind)).eps)


def _call(f: Callable[[Tree], Tree], x: Tree, context: Callable[[], AbstractContextManager[object]]) -> Tree:
    with context():
        return f(x)
