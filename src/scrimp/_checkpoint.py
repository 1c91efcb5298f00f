"""Checkpointing one region of the forward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from scrimp._compiler import never_compiled
from scrimp._session import session
from scrimp.errors import SessionError
from scrimp.policy import Answer, Candidate, KeepNone, Policy

P = ParamSpec("P")
R = TypeVar("R")
_Policy = Policy | Callable[[Candidate], Answer]


@overload
def checkpoint(*, policy: _Policy = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def checkpoint(fn: Callable[..., R], /, *args: Any, policy: _Policy = ..., **kwargs: Any) -> R: ...
def checkpoint(fn: Any = None, /, *args: Any, policy: _Policy = KeepNone(), **kwargs: Any) -> Any:  # noqa: B008
    """Call ``fn(*args, **kwargs)`` and save of it for backward only what ``policy`` keeps: by default, nothing.

    Arguments and results can be anything: any number of tensors, nested in any containers, and other objects;
    ``fn`` may close over tensors and modules. It is not run again in backward: what is repeated are the ATen
    operators that it called, so its side effects happen once. With gradients switched off it is a plain call.

    Called without a function it gives a decorator:

    >>> import torch, scrimp
    >>> @scrimp.checkpoint(policy=scrimp.policy.KeepOps({torch.ops.aten.mm}))
    ... def block(x, *, weight):
    ...     return torch.tanh(x @ weight).sin()
    >>> w = torch.randn(4, 4, requires_grad=True)
    >>> block(torch.randn(2, 4), weight=w).sum().backward()

    Args:
        fn: What to call.
        *args: Its positional arguments.
        policy: What to keep; see :mod:`scrimp.policy`. (A function with an argument of its own of that name can be
            wrapped with ``functools.partial``.)
        **kwargs: Its keyword arguments.
    """
    if fn is None:
        return lambda function: functools.wraps(function)(lambda *args, **kwargs: _run(function, policy, args, kwargs))
    return _run(fn, policy, args, kwargs)


@never_compiled
def _run(fn: Callable[..., Any], policy: _Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    with session(policy):
        result = fn(*args, **kwargs)
    if inspect.isgenerator(result) or inspect.isawaitable(result) or inspect.isasyncgen(result):
        raise SessionError(
            f"checkpoint needs a function that has done its work when it returns; {fn!r} returned a "
            f"{type(result).__name__}, which runs later, outside of the region. Checkpoint what it does in each step "
            "instead"
        )
    return result
