"""Where the graph of one step begins: at its arguments, behind which is what the steps before it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from scrimp.errors import LoopError


@final
class Gate:
    """Whether the step is over that has the arguments."""

    over = False


@final
class Entry(torch.autograd.Function):
    """Hands a step its arguments. In the graph they depend on all that the loop depends on, as in the plain loop.

    So a step may differentiate with respect to them and to what it made itself; a gradient that would have to go on,
    to the steps before, comes here.
    """

    @staticmethod
    def forward(ctx: Any, gate: Gate, arguments: Sequence[Tensor], behind: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments."""
        ctx.gate = gate
        return tuple(arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> None:
        """Refuse: there is no way on from here."""
        if ctx.gate.over:
            raise LoopError(
                "a tensor that a step of the loop left outside was differentiated, and its graph ends where that step "
                "began; return it as an output of the step"
            )
        raise LoopError(
            "a step of the loop differentiates with respect to a tensor from outside, on which its arguments depend as "
            "well, through the steps before it; in the plain loop the gradient would go through all of those. "
            "Differentiate with respect to the step's own arguments, or to an alias that the step makes and uses "
            "(alias = tensor.view_as(tensor)), or detach() the arguments first"
        )


@final
class Behind(torch.autograd.Function):
    """What a loop depends on, as one tensor."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Return a tensor of no size."""
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Never called: :class:`Entry` lets nothing through."""
        raise AssertionError("unreachable: Entry refuses")
