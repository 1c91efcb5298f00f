"""Keeping torch.compile away from what must run as it is written."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from scrimp.errors import ScrimpError

F = TypeVar("F", bound=Callable[..., Any])

_OPERANDS_ONLY = (
    "scrimp: while a step is recorded, PyTorch does not compile what is given to torch.cond and its like. Such "
    "functions may read no tensors but their operands, and must return a tuple: write them so, or use Python's own `if`"
)


def explain(error: BaseException) -> None:
    """Add to an error that comes from within an operator of functions what such an operator asks for here."""
    if isinstance(error, ScrimpError) or not isinstance(error, Exception):
        return
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    if any(frame.f_globals.get("__name__", "").startswith("torch._higher_order_ops") for frame in frames):
        error.add_note(_OPERANDS_ONLY)


def never_compiled(function: F) -> F:
    """Have ``torch.compile`` run this function, and all that it calls, in eager mode.

    ``torch.compiler.disable`` does the same by a wrapper, which costs time in each call, and imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "scrimp records operators one by one"  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function
