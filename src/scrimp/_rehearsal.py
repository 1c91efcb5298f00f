"""The smallest budget for a step that could not be finished: it is rehearsed on descriptions of its tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from scrimp._answers import Answers
from scrimp._book import line
from scrimp._fake_trace import Followed, described, follow, forward_alone
from scrimp._machine import Machine, machine
from scrimp._meter import Before
from scrimp._roofline import EndlessError, FusedKernels, attention
from scrimp._solve import plan
from scrimp._trace import Trace
from scrimp.errors import BudgetError

_CLOSE = 0.01  # a smallest budget is found to this part of it
_ROUNDS = 8
_SLACK = 0.05  # added to it: nobody knows the loss yet, and some operators run in another way on the device
_AHEAD = 1.25  # of a forward pass that nobody can follow to its end, so much is asked for what was seen of it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A budget that a step fits into, as far as can be seen without data.

    Attributes:
        nbytes: the budget.
        guesses: how often the step asked its data what nobody knows.
        whole: whether backward fits, too; otherwise the forward pass was not followed to its end.
    """

    nbytes: int
    guesses: int = 0
    whole: bool = True


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
        self._with_gradients = frozenset(id(one) for one in module.parameters() if one.grad is not None)
        self._args, self._kwargs = tree_map(described, (tuple(args), dict(kwargs)))

    def smallest(self, before: Before, device: torch.device, at_least: int, answers: Answers) -> Rehearsed | None:
        """Return a budget that the step fits into, close to the smallest; None where it cannot be followed.

        Args:
            before: what is on the device before the step.
            device: which.
            at_least: bytes that it is known to take.
            answers: what the step has been answered so far, when it asked its data.
        """
        block = 512 if device.type == "cuda" else 1
        return apart(lambda: self._search(block, before.nbytes, at_least, answers))

    def _search(self, block: int, there: int, at_least: int, answers: Answers) -> Rehearsed:
        try_in = partial(self._follow, block, answers)
        try:
            first = try_in(None)
        except EndlessError:
            here, kernels = self._played(block)
            alone = forward_alone(here, self._module, self._args, self._kwargs, kernels, answers)
            made = max(alone, at_least - there)
            return Rehearsed(there + int(made * _AHEAD), whole=False)
        return Rehearsed(there + _smallest(try_in, first.trace, max(at_least - there, 1)), first.answered)

    def _follow(self, block: int, answers: Answers, budget: int | None) -> Followed:
        here, kernels = self._played(block)
        return follow(
            here, self._module, self._args, self._kwargs, budget, _stand_in, kernels, answers, self._with_gradients
        )

    @staticmethod
    def _played(block: int) -> tuple[Machine, type[TorchFunctionMode]]:
        return replace(machine("CPU"), block=block), FusedKernels if block > 1 else _HostKernels


def apart(work: Callable[[], T]) -> T | None:
    """Return what some work returns, done in a thread of its own; None if it fails.

    Such a thread has none of the modes, hooks and running backward passes of the step that failed.
    """
    found: list[T] = []

    def run() -> None:
        line.depth += 1  # so that what is limited does as it did before
        try:
            found.append(work())
        except Exception:  # the model's own code may run here without data, and say anything
            found.clear()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def _smallest(try_in: Callable[[int], Followed], trace: Trace, at_least: int) -> int:
    low, high, growth = at_least, max(at_least, _planned(trace)), _CLOSE
    while need := _need(try_in, high):
        low, high, growth = need, max(need, int(high * (1 + growth))), 2 * growth
    for _ in range(_ROUNDS):
        if high - low <= _CLOSE * high:
            break
        middle = (low + high) // 2
        need = _need(try_in, middle)
        low, high = (min(need, high), high) if need else (low, middle)
    return int(high * (1 + _SLACK))


def _planned(trace: Trace) -> int:
    """Return the smallest budget of a plan for the step."""
    try:
        return plan(replace(trace, resident=()), 1).peak
    except BudgetError as error:
        return error.smallest or 1


def _need(try_in: Callable[[int], Followed], budget: int) -> int:
    """Return 0 if the step fits into a budget, and what it needs at least otherwise."""
    try:
        try_in(budget)
    except BudgetError as error:
        return max(error.smallest or 0, budget + 1)
    return 0


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
    if not found and isinstance(outputs, Mapping):
        found = [one for one in tree_leaves(list(outputs.values())) if isinstance(one, Tensor) and one.requires_grad]
    losses = [one for one in found if one.numel() == 1]
    if losses:
        return losses[0].sum()
    return torch.stack([one.float().square().mean() for one in found]).sum()
