"""What PyTorch itself computes otherwise while any dispatch mode is on, and must not under ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import scrimp
from scrimp.policy import EveryN, KeepNone, Online
from scrimp.testing import Step, assert_same_outcome, assert_same_step

# Gradients of these have a formula for plain tensors and another one for all else, which a dispatch mode selects.
TWO_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.mean()),
    "min": lambda x: -x.min(),
    "median": lambda x: -x.median(),
    "nanmedian": lambda x: -x.nanmedian(),
}


class Counting(TorchDispatchMode):
    """A mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count."""
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def make_step(function: Callable[[Tensor], Tensor]) -> Step:
    """The function between others, on a leaf."""
    x = torch.randn(7, 5, dtype=torch.float64).requires_grad_()
    return Step(lambda: function((x * 1.5).sin()).square(), state=x)


@pytest.mark.parametrize("name", TWO_FORMULAS)
@pytest.mark.parametrize("policy", [KeepNone(), EveryN(1)])
def test_backward_inside_uses_the_formula_of_plain_backward(name: str, policy: scrimp.policy.Policy) -> None:
    """The last bit, and the sign of zeros, are as without a session, also where backward runs in the block."""
    assert_same_step(lambda: make_step(TWO_FORMULAS[name]), lambda: scrimp.session(policy), backward_inside=True)


def test_the_first_step_under_a_limit_uses_the_formula_of_plain_backward() -> None:
    """It is recorded from end to end, with a mode of ours on in backward too."""
    x = torch.randn(6, 8, dtype=torch.float64)

    class Model(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) * 0.3 + 1
            return y.prod() + y.masked_fill(y > 1, y.mean()).sum() - y.min()

    def make(limited: bool) -> Step:
        model = Model(8, 8, dtype=torch.float64)
        if limited:
            scrimp.limit(model, "1GiB")
        return Step(lambda: model(x), state=model)

    assert_same_outcome(lambda: make(limited=False), lambda: make(limited=True))


def test_modes_of_others_see_all_of_backward() -> None:
    """Ours steps aside node by node; one that the user entered in the block does not."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def seen(session: Callable[[], Any]) -> list[str]:
        with session(), Counting() as mode:
            torch.autograd.grad(x.sin().exp().sum(), x)
        return mode.seen

    plain = seen(lambda: torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
    assert [name for name in seen(lambda: scrimp.session(EveryN(1))) if name != "aten.detach.default"] == [
        name for name in plain if name != "aten.detach.default"
    ]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_kernels_that_conjugate_lazily(dtype: torch.dtype, backward_inside: bool) -> None:
    """``pinv`` of complex matrices multiplies by one that is conjugated lazily, which a mode makes PyTorch forget."""

    def make() -> Step:
        x = torch.randn(4, 3, dtype=dtype).requires_grad_()
        return Step(lambda: torch.linalg.pinv(x * 2).exp() * x.mH, state=x)

    session = scrimp.session(KeepNone())
    assert_same_step(make, lambda: session, backward_inside=backward_inside)
    assert session.statistics.replayed_operators > 0


def test_a_convolution_whose_input_needs_no_gradient_has_a_cost() -> None:
    """Its backward, recorded for a second one, returns no gradient in that place; an eviction asks what it costs."""

    def make() -> Step:
        x = torch.randn(2, 1, 6)
        weight = torch.randn(3, 1, 3).requires_grad_()

        def forward() -> Tensor:
            y = torch.nn.functional.conv1d(x, weight).sin()
            (gradient,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
            return gradient.exp().sin().sum()

        return Step(forward, state=weight)

    assert_same_step(make, lambda: scrimp.session(Online(0)))
