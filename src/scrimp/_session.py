"""Sessions: a stretch of forward code under a policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, overload

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from scrimp._budget import Budget
from scrimp._budget_session import BudgetSession
from scrimp._compiler import never_compiled
from scrimp._elsewhere import Elsewhere
from scrimp._keeping import KeepingHooks
from scrimp._record import Recorder
from scrimp._record_mode import RecordMode
from scrimp._saved import Hooks
from scrimp._scope import Control, Scope
from scrimp._statistics import Statistics
from scrimp.errors import PolicyError, SessionError
from scrimp.policy import Answer, Candidate, KeepAll, Policy, as_policy
from scrimp.store import Disk, Host


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


@contextmanager
def apart() -> Iterator[None]:
    """Run the block as if no session were open around it. Sessions that are entered inside it work as usual."""
    modes = _get_current_dispatch_mode_stack()
    recorders = [mode.recorder for mode in modes if isinstance(mode, RecordMode)]
    outer, _current.recorder = _current.recorder, None
    for recorder in recorders:
        recorder.paused += 1
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.paused -= 1
        _current.recorder = outer


class Session:
    """A context in which operators are recorded, and what autograd saves is kept or dropped. See :func:`session`."""

    def __init__(self, policy: Policy, verify: bool) -> None:
        self._control = Control(policy, verify)
        self._open: ExitStack | None = None
        self._recording = False

    @property
    def policy(self) -> Policy:
        """The policy in force; assign another, or a callable, at any time."""
        return self._control.policy

    @policy.setter
    def policy(self, policy: Policy | Callable[[Candidate], Answer]) -> None:
        new = as_policy(policy)
        if self._open and not self._recording and not isinstance(new, KeepAll):
            raise SessionError(
                "this session was entered with KeepAll, which records nothing, so nothing can be dropped in it now; "
                "enter it with the other policy and set session.enabled = False for as long as everything is to be kept"
            )
        self._control.policy = new

    @property
    def enabled(self) -> bool:
        """Whether the policy is asked. While it is False, all that autograd saves is kept. Switch it at any time."""
        return self._control.enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._control.enabled = enabled

    @property
    def statistics(self) -> Statistics:
        """What the session did so far and holds now."""
        return self._control.ledger.snapshot(self._control.policy.budget)

    @never_compiled
    def __enter__(self) -> Self:
        if self._open is not None:
            raise SessionError("this session is open already; to nest sessions, make another one")
        outer = _current.recorder
        with ExitStack() as stack:
            hooks: Hooks | KeepingHooks
            if outer is not None:
                scope = Scope(self._control, parent=outer.scope)
                stack.callback(setattr, outer, "scope", outer.scope)
                outer.scope = scope
                hooks = Hooks(outer, scope)
            elif isinstance(self.policy, KeepAll):
                hooks = KeepingHooks(self._control.ledger)
            else:
                scope = Scope(self._control, parent=None)
                recorder = Recorder(scope)
                stack.callback(recorder.close)
                stack.callback(setattr, _current, "recorder", None)
                _current.recorder = recorder
                stack.enter_context(RecordMode(recorder))
                hooks = Hooks(recorder, scope)
            try:
                stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
            except RuntimeError as error:  # torch.func.grad, vjp, jacrev and hessian switch saved-tensor hooks off
                raise SessionError(
                    f"a session works through saved-tensor hooks, which are switched off here: {error}"
                ) from error
            self._recording = isinstance(hooks, Hooks)
            self._open = stack.pop_all()
        return self

    @never_compiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            raise SessionError("this session is not open")
        stack, self._open = self._open, None
        stack.__exit__(kind, error, trace)


@overload
def session(policy: Policy | Callable[[Candidate], Answer], *, verify: bool = ...) -> Session: ...
@overload
def session(
    policy: Budget | None = ...,
    *,
    activations: Budget | None = ...,
    device: torch.device | str | None = ...,
    host: Host | Budget | None = ...,
    disk: Disk | Budget | None = ...,
) -> BudgetSession: ...
def session(
    policy: Policy | Callable[[Candidate], Answer] | Budget | None = None,
    *,
    verify: bool = False,
    activations: Budget | None = None,
    device: torch.device | str | None = None,
    host: Host | Budget | None = None,
    disk: Disk | Budget | None = None,
) -> Session | BudgetSession:
    """Return a context manager under which autograd saves only what ``policy`` keeps, or what a budget allows.

    With a budget in bytes instead of a policy, the steps that begin in the block are recorded, planned and held under
    the budget as :func:`scrimp.limit` does for a model; enter the same session in every step.

    What is dropped is computed again, exactly, when backward asks for it. Backward may run inside the block or outside,
    now or later, in any thread. A session can be entered again after it was left, and sessions nest: what an inner
    one saves is decided by its own policy, what crosses its border by the policy around it.

    Args:
        policy: Decides for each value; see :mod:`scrimp.policy`. Or the bytes that the device may hold at any moment of
            the step: ``"8GiB"``, ``"8 GB"``, an int, or a fraction of the device such as ``0.9``.
        activations: Instead of both: bytes for what the step makes, beyond what was there before.
        device: The one that a budget is for; without it the current GPU, or the CPU where there is none.
        host: Beside a budget: bytes of host memory in which values may wait; see :func:`scrimp.limit`.
        disk: Beside a budget: bytes of files in which values may wait.
        verify: Keep a copy of each dropped value in host memory and compare it, bit by bit, with what its replay gives;
            raise :class:`scrimp.errors.ReplayMismatchError` where they differ. For tests: it saves no memory.

    >>> import torch, scrimp
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    >>> with scrimp.session(policy=scrimp.policy.KeepNone()) as session:
    ...     loss = model(torch.randn(4, 8)).square().sum()
    >>> session.statistics.kept.bytes
    0
    >>> loss.backward()
    >>> limited = scrimp.session(activations="10 kB")
    >>> for _ in range(2):
    ...     with limited:
    ...         loss = model(torch.randn(4, 8)).square().sum()
    ...     loss.backward()
    >>> limited.plan.peak <= limited.plan.budget
    True
    """
    if activations is not None or policy is None or isinstance(policy, (int, float, str)):
        if verify:
            raise PolicyError("verify=True compares what a policy drops; a session with a budget has none")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        on = torch.device(device or default)
        return BudgetSession(policy, activations, on, None, Elsewhere(host, disk, on))  # type: ignore[arg-type]
    if host is not None or disk is not None:
        raise PolicyError("host= and disk= go with a budget; a policy names its store: StoreAll(scrimp.store.Host())")
    return Session(as_policy(policy), verify)
