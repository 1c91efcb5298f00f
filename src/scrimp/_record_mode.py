"""The dispatch mode that shows operators to a recorder, and when it looks away."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from scrimp._below import passed_on
from scrimp._compiler import never_compiled

if TYPE_CHECKING:
    from scrimp._record import Recorder
    from scrimp._value import Call

_NOTHING: Mapping[str, Any] = {}


class _Replaying(threading.local):
    """Whether this thread is repeating operators: then no recorder takes note of them."""

    active = False
    call: Call | None = None
    """The operator that is being repeated."""


replaying = _Replaying()


class OurMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that is on while steps run, and must leave no trace in their bits."""

    supports_higher_order_operators = True
    """``torch.cond`` and its like come to ``__torch_dispatch__`` too, and are passed on: what they make is kept."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps `__torch_dispatch__` in what imports the compiler, seconds long, and costs a microsecond
        # an operator. `never_compiled` does what that is for.
        return False


class RecordMode(OurMode):  # type: ignore[no-untyped-call]
    """Shows every operator to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such: what its kernels make is kept."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = _NOTHING
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if replaying.active or self.recorder.paused:
            return passed_on(func, args, kwargs)
        own = [kind for kind in types if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__] if types else None
        if own:
            if all(issubclass(kind, FakeTensor) for kind in own):
                return func(*args, **kwargs)  # nothing is computed; a compiler, say, wants to know the shapes
            # A subclass with a dispatch of its own: let it take itself apart, and see what it calls.
            return NotImplemented
        return self.recorder.run(func, args, kwargs)


# Backward nodes that compute with another formula, which rounds otherwise, while any dispatch mode is on.
_TWO_FORMULAS = {
    "MaskedFillBackward",
    "MaxBackward",
    "MedianBackward",
    "MinBackward",
    "NanmedianBackward",
    "ProdBackward",
}


def step_aside() -> None:
    """Take our modes out of the way of the backward node that is running, until its end, where they change its bits.

    The engine puts them back for the next node. A mode that only records forward code always goes; one that is there
    for backward goes where the formula would be another one. A node in Python, which can do anything, and a backward
    pass that is itself recorded keep theirs.
    """
    if not torch._C._len_torch_dispatch_stack() or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return
    modes = _get_current_dispatch_mode_stack()
    node: object = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        return
    to_go: list[TorchDispatchMode] = [mode for mode in modes if type(mode) is RecordMode]
    if type(node).__name__.rstrip("0123456789") in _TWO_FORMULAS:
        to_go = [mode for mode in modes if isinstance(mode, OurMode)]
    if to_go:
        for _ in modes:
            _pop_mode()
        for mode in modes:
            if mode not in to_go:
                _push_mode(mode)
