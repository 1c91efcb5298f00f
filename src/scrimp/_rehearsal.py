"""The smallest budget for a step that could not be finished: it is rehearsed on descriptions of its tensors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from scrimp._book import line
from scrimp._fake_trace import described, follow
from scrimp._machine import machine
from scrimp._meter import Before
from scrimp._roofline import FusedKernels, attention
from scrimp._solve import plan
from scrimp._trace import Trace
from scrimp.errors import BudgetError

_CLOSE = 0.01  # a smallest budget is found to this part of it
_ROUNDS = 8
_SLACK = 0.05  # added to it: nobody knows the loss yet, and some operators run in another way on the device
_FROM_BEFORE = "gradients from before"  # those that are described are not there yet


@final
class Rehearsal:
    """A call of a module that can be gone through without data, forward and backward, in any budget.

    Args:
        module: the module.
        args: of the call; only what they look like is held.
        kwargs: likewise.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._module = module
        self._args, self._kwargs = tree_map(described, (tuple(args), dict(kwargs)))

    def smallest(self, before: Before, device: torch.device, at_least: int) -> int | None:
        """Return a budget that the step fits into, close to the smallest; None where it cannot be followed.

        Args:
            before: what is on the device before the step.
            device: which.
            at_least: bytes that it is known to take.
        """
        found: list[int] = []
        # A thread of its own has none of the modes, hooks and running backward passes of the step that failed.
        thread = threading.Thread(target=self._search, args=(before, device, at_least, found))
        thread.start()
        thread.join()
        return found[0] if found else None

    def _search(self, before: Before, device: torch.device, at_least: int, found: list[int]) -> None:
        there = sum(part.nbytes for part in before.parts if part.name != _FROM_BEFORE)
        block = 512 if device.type == "cuda" else 1
        line.depth += 1  # so that what is limited does as it did before
        try:
            found.append(there + self._smallest(block, max(at_least - there, 1)))
        except Exception:  # the model's own code runs here without data, and may say anything
            found.clear()

    def _smallest(self, block: int, at_least: int) -> int:
        low, high, growth = at_least, max(at_least, self._planned(block)), _CLOSE
        while need := self._need(block, high):
            low, high, growth = need, max(need, int(high * (1 + growth))), 2 * growth
        for _ in range(_ROUNDS):
            if high - low <= _CLOSE * high:
                break
            middle = (low + high) // 2
            need = self._need(block, middle)
            low, high = (min(need, high), high) if need else (low, middle)
        return int(high * (1 + _SLACK))

    def _planned(self, block: int) -> int:
        """Return the smallest budget of a plan for the step."""
        trace = self._follow(block, None)
        try:
            return plan(replace(trace, resident=()), 1).peak
        except BudgetError as error:
            return error.smallest or 1

    def _need(self, block: int, budget: int) -> int:
        """Return 0 if the step fits into a budget, and what it needs at least otherwise."""
        try:
            self._follow(block, budget)
        except BudgetError as error:
            return max(error.smallest or 0, budget + 1)
        return 0

    def _follow(self, block: int, budget: int | None) -> Trace:
        here = replace(machine("CPU"), block=block)
        kernels = FusedKernels if block > 1 else _HostKernels
        return follow(here, self._module, self._args, self._kwargs, budget, _stand_in, kernels).trace


@final
class _HostKernels(TorchFunctionMode):
    """Has attention call a fused kernel where the CPU has one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not (kwargs.get("dropout_p") or any(args[4:5])):
            return attention(*args, **kwargs)
        return func(*args, **kwargs)


def _stand_in(outputs: Any) -> Tensor:
    """Return a loss of what a module returns: nobody knows yet what the program makes of it."""
    found = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    if not found and hasattr(outputs, "values"):
        found = [one for one in tree_leaves(list(outputs.values())) if isinstance(one, Tensor) and one.requires_grad]
    losses = [one for one in found if one.numel() == 1]
    if losses:
        return losses[0].sum()
    return torch.stack([one.float().square().mean() for one in found]).sum()
