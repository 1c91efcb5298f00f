"""Outputs of steps, stacked as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scrimp.errors import LoopError


def transformed() -> bool:
    """Tell whether a transform of torch.func or a forward-mode derivative is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@final
class Stacks:
    """One stack for each leaf of the output; where the length is known, memory is taken only once.

    Outputs that a transform of torch.func wraps, or that have a tangent, cannot be written to memory that does not.
    """

    def __init__(self, length: int | None) -> None:
        self._length = None if transformed() else length
        self._first: list[Any] = []
        self._buffers: list[Any] = []
        self.wants: list[bool] = []
        """Which of them require grad."""

    def add(self, step: int, output: Sequence[Any]) -> None:
        """Take the output of a step."""
        if step == 0:
            self._first = [None if leaf is None else (leaf.shape, leaf.dtype, leaf.device) for leaf in output]
            self._buffers = [self._buffer(leaf) for leaf in output]
            self.wants = [False] * len(output)
        for place, (leaf, first, buffer) in enumerate(zip(output, self._first, self._buffers, strict=True)):
            found = None if leaf is None else (leaf.shape, leaf.dtype, leaf.device)
            if found != first:
                raise LoopError(
                    f"outputs of all steps must be alike to be stacked; the first was {first}, have {found}"
                )
            if leaf is None:
                continue
            self.wants[place] |= leaf.requires_grad
            with torch.no_grad():
                if isinstance(buffer, list):
                    buffer.append(leaf.detach() if leaf.requires_grad else leaf)
                else:
                    buffer[step].copy_(leaf)

    def _buffer(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if self._length is None:
            return []
        return torch.empty((self._length, *leaf.shape), dtype=leaf.dtype, device=leaf.device)

    def finished(self) -> list[Tensor | None]:
        """Return the stacks."""
        done = [torch.stack(one) if isinstance(one, list) else one for one in self._buffers]
        self._buffers = []
        return done
