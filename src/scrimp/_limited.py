"""What takes the place of a limited model's ``forward``."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from scrimp._book import line
from scrimp._compiler import never_compiled
from scrimp._rehearsal import Rehearsal

Enter = Callable[[list[object], object, nn.Module, Callable[[], Rehearsal]], AbstractContextManager[None]]
"""Given the leaves of a call's arguments, its signature, the model, and what can rehearse it: what it runs in."""


@final
class LimitedForward:
    """Calls what was there before, under the budget where it is part of a training step.

    A copy of the model, by ``copy.deepcopy`` or through a file, is not limited: it gets what was there before.

    The model is not held: it goes with the last of its other owners, limited or not.

    Args:
        model: the model.
        where: says on which device the model is.
        enter: returns what a call runs in.
    """

    def __init__(self, model: nn.Module, where: Callable[[], torch.device], enter: Enter) -> None:
        forward = model.forward
        self._model = weakref.ref(model)
        self._own = model.__dict__.get("forward")
        self._where = where
        self._enter = enter
        functools.update_wrapper(self, forward)
        del self.__dict__["__wrapped__"]  # it holds the model
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(forward)

    def before(self) -> Callable[..., Any]:
        """Return what was there before."""
        model = self._model()
        assert model is not None, "only a model that is there can be called"
        return MethodType(type(model).forward, model) if self._own is None else self._own

    def put_back(self) -> None:
        """Leave the model as it was."""
        model = self._model()
        if model is None:
            return
        if self._own is None:
            del model.forward
        else:
            model.forward = self._own

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        forward, model = self.before(), self._model()
        if not torch.is_grad_enabled() or line.depth or torch._C._current_graph_task_id() != -1 or model is None:
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        signature = (str(structure), tuple(_look(leaf) for leaf in leaves), _state(model, self._where()))
        with self._enter(leaves, signature, model, lambda: Rehearsal(model, args, kwargs)):
            return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.before(),)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _look(leaf: object) -> object:
    match leaf:
        case Tensor():
            return (leaf.dtype, tuple(leaf.shape), leaf.stride() if leaf.layout is torch.strided else None,
                    leaf.device, leaf.requires_grad)  # fmt: skip
        case bool() | str() | None:
            return leaf
    return type(leaf)  # numbers may count steps; one that changes what runs makes the step depart from its plan


def _state(model: nn.Module, device: torch.device) -> object:
    """Say what else a step depends on: modes, and which gradients are there to be added to."""
    present = sum(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    wanted = sum(parameter.requires_grad for parameter in model.parameters())
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return model.training, present, wanted, autocast
