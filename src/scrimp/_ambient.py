"""A dispatch mode and saved-tensor hooks that stay in force after the block that set them, below all others.

Those of other people come and go above ours without taking notice, as long as ours lie below theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


@final
class Ambient:
    """A mode, and perhaps a pair of hooks, for this thread and the engine threads that work for it."""

    def __init__(self, mode: TorchDispatchMode, hooks: _Pair | None = None) -> None:
        self._mode = mode
        self._hooks = hooks
        self.mode_is_on = False
        self.hooks_are_on = False

    def enter(self) -> None:
        """Turn the mode on; and the hooks, unless somebody else's are: only the innermost pair is asked."""
        if not self.mode_is_on:
            above = _pop_modes(None)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            _push_modes(above)
            self.mode_is_on = True
        if self._hooks is not None and not self.hooks_are_on and _top_hooks() is None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
            self.hooks_are_on = True

    def leave(self) -> None:
        """Turn both off, wherever they are. From another thread nothing can be done but to let the mode do nothing."""
        if self.mode_is_on and self._mode in _get_current_dispatch_mode_stack():
            above = _pop_modes(self._mode)
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _push_modes(above)
        self.mode_is_on = False
        if self._hooks is not None and self.hooks_are_on:
            _remove_hooks(self._hooks)
        self.hooks_are_on = False


def _remove_hooks(ours: _Pair) -> None:
    above: list[_Pair] = []
    while (top := _top_hooks()) is not None and top[0] != ours[0]:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def _top_hooks() -> _Pair | None:
    top: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def _pop_modes(down_to: TorchDispatchMode | None) -> list[TorchDispatchMode]:
    """Take modes off the stack, from the top; return them in that order."""
    popped: list[TorchDispatchMode] = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if mode is down_to:
            break
        popped.append(_pop_mode())
    return popped


def _push_modes(popped: list[TorchDispatchMode]) -> None:
    for mode in reversed(popped):
        _push_mode(mode)
