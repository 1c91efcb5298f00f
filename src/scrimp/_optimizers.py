"""Optimizers of a model's parameters: what they hold, and what they are going to hold once they have made a step."""

from __future__ import annotations

import copy
import gc
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scrimp._live import rounded

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_KERNELS = ("fused", "capturable", "foreach")  # which kernels step: of those, not all take descriptions
_COUNTING = ("fused", "capturable")  # these count their steps on the device


def optimizers_of(parameters: Set[int]) -> list[Optimizer]:
    """Return all optimizers that step one of these parameters, given by id."""
    kinds = {id(kind) for kind in _kinds(Optimizer)}
    found: list[Optimizer] = [candidate for candidate in gc.get_objects() if id(type(candidate)) in kinds]
    return [one for one in found if any(id(parameter) in parameters for parameter in _stepped(one))]


def state_of(parameters: Set[int]) -> Iterator[Tensor]:
    """Yield the tensors that optimizers hold for these parameters, given by id."""
    for optimizer in optimizers_of(parameters):
        for parameter, state in optimizer.state.items():
            if id(parameter) in parameters:
                yield from _tensors(state)


@dataclass(frozen=True, slots=True)
class Coming:
    """What optimizers are going to hold beyond what they hold now.

    Attributes:
        nbytes: bytes that are foreseen.
        unforeseen: the names of optimizers whose first step cannot be tried without data.
    """

    nbytes: int = 0
    unforeseen: tuple[str, ...] = ()


def state_to_come(parameters: Sequence[Tensor], device: torch.device) -> Coming:
    """Find out what the first steps of optimizers add on a device, by a step of a copy on descriptions.

    Each parameter that requires grad is taken to have a gradient then.

    Args:
        parameters: of the models.
        device: which.
    """
    block = 512 if device.type == "cuda" else 1
    own = {id(parameter) for parameter in parameters if parameter.requires_grad}
    nbytes = 0
    unforeseen = []
    for optimizer in optimizers_of(own):
        new = {id(one) for one in _stepped(optimizer) if id(one) in own and not _tensors(optimizer.state.get(one))}
        if not new:
            continue
        try:
            nbytes += sum(rounded(size, block) for size in _first_state(optimizer, new, device))
        except Exception:  # an optimizer's own code runs here without data, and may say anything
            unforeseen.append(type(optimizer).__name__)
    return Coming(nbytes, tuple(unforeseen))


def _first_state(optimizer: Optimizer, new: Set[int], device: torch.device) -> list[int]:
    """Return the bytes of each storage that a first step makes on a device for some parameters."""
    copied, copies = _described_copy(optimizer, new)
    with torch.no_grad(), _Numbers():  # type: ignore[no-untyped-call]
        inspect.unwrap(type(optimizer).step)(copied)
    on_device = any(group.get(name) for group in optimizer.param_groups for name in _COUNTING)
    here = {"meta", "cpu"} if device.type == "cpu" or on_device else {"meta"}
    made = [one for old in new for one in _tensors(copied.state.get(copies[old])) if one.device.type in here]
    return list({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in made}.values())


def _described_copy(optimizer: Optimizer, new: Set[int]) -> tuple[Optimizer, Mapping[int, Tensor]]:
    """Return a copy of an optimizer that steps descriptions, the ``new`` ones of which have gradients; and these."""
    copies: dict[int, Tensor] = {}
    memo: dict[int, Any] = {}
    for parameter in _stepped(optimizer):
        described = nn.Parameter(_like(parameter), parameter.requires_grad)
        if id(parameter) in new:
            described.grad = _like(parameter)
        copies[id(parameter)] = memo[id(parameter)] = described
    # What a scheduler puts into the instance, and what users hook to it, is not to see a step that never was.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    copied: Optimizer = object.__new__(type(optimizer))
    with _Described():
        vars(copied).update(copy.deepcopy({**own, **{name: OrderedDict() for name in _HOOKS if name in own}}, memo))
    copied.state = defaultdict(dict, copied.state)
    for group in copied.param_groups:
        group.update({name: False for name in _KERNELS if name in group})
    return copied, copies


@final
class _Described(TorchFunctionMode):
    """Has ``copy.deepcopy`` make descriptions of tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            number = tensor.ndim == 0 and tensor.device.type == "cpu"
            return memo.setdefault(id(tensor), tensor.detach().clone() if number else _like(tensor))
        if func is Tensor.clone:  # of a parameter's data
            return _like(args[0])
        return func(*args, **(kwargs or {}))


@final
class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers with 1 where an optimizer reads a number: it makes no difference to the bytes of what it holds."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(state: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def _kinds(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
