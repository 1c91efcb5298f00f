"""A whole loop as one node in autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from scrimp._compiler import never_compiled
from scrimp._loops.reverse import Reversal
from scrimp._loops.step import Frame
from scrimp._loops.tape import Tape
from scrimp.errors import OrderError


@final
class Loop(torch.autograd.Function):
    """Takes the tensors that the loop depends on, and returns what it computed already."""

    @staticmethod
    def forward(
        ctx: Any, tape: Tape, first: Frame, results: Sequence[Tensor], places: Sequence[int | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Give what the loop computed its place in the graph.

        ``tensors`` are those from outside, then those of the first state, each once, then xs. ``places`` says for each
        leaf of the final state, and then of the outputs, which of the results it is.
        """
        own = list({id(leaf): leaf for leaf in first.leaves if isinstance(leaf, Tensor)})
        ctx.tape, ctx.places, ctx.wants = tape, places, first.wants
        ctx.constants = [own.index(id(leaf)) if isinstance(leaf, Tensor) else (leaf,) for leaf in first.leaves]
        ctx.own = len(own)
        ctx.outer = len(tape.borders)
        ctx.save_for_backward(*tensors[ctx.outer :])
        ctx.sums = None
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Go back through the loop."""
        tensors = ctx.saved_tensors
        own, xs = tensors[: ctx.own], tensors[ctx.own :]
        leaves = [own[one] if isinstance(one, int) else one[0] for one in ctx.constants]
        first = Frame(leaves, ctx.wants, tuple(leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves))
        by = [None if place is None else gradients[place] for place in ctx.places]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        reversal = Reversal(ctx.tape, first, xs, by[: len(leaves)], by[len(leaves) :], keep)
        reversal.run(ctx.sums)
        by_own: list[Tensor | None] = [None] * ctx.own
        for one, gradient in zip(ctx.constants, reversal.by_state, strict=True):
            if isinstance(one, int):
                by_own[one] = gradient
        found = [*reversal.by_outer, *by_own, *reversal.by_xs]
        if torch.is_grad_enabled():
            found = _first_order(found, (*ctx.tape.borders.values(), *tensors, *gradients))
        return None, None, None, None, *found


def _first_order(found: Sequence[Tensor | None], on: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients such that differentiating them is an error."""
    tensors = [one for one in found if one is not None]
    tied: tuple[Tensor, ...] = _FirstOrder.apply(len(tensors), *tensors, *on)  # type: ignore[no-untyped-call]
    left = iter(tied)
    return [None if one is None else next(left) for one in found]


@final
class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(one if one is None else one.view_as(one) for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise OrderError(
            "the gradient of scan() was differentiated, which it cannot be: it is computed step by step, and no graph "
            "of it is kept. For second derivatives write the loop plainly, perhaps in a scrimp.session"
        )
