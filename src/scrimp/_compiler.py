"""Keeping torch.compile away from what must run as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def never_compiled(function: F) -> F:
    """Have ``torch.compile`` run this function, and all that it calls, in eager mode.

    ``torch.compiler.disable`` does the same by a wrapper, which costs time in each call, and imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "scrimp records operators one by one"  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function
