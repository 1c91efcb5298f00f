"""One training step under a budget: recorded while it is unknown, carried out as planned once it is known."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks

from scrimp._ambient import Ambient
from scrimp._below import passed_on
from scrimp._draft import Draft
from scrimp._limiter import Limiter
from scrimp._meter import Before
from scrimp._operators import Operator
from scrimp._plan import Keep, Plan
from scrimp._record import Recorder, tensors_in
from scrimp._record_mode import RecordMode
from scrimp._saved import Hooks
from scrimp._trace import Trace, Unpack
from scrimp._tracing import Tracing
from scrimp.policy import Planned


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a limited module, or an entry into a session: whose it is, and what its inputs look like."""

    owner: int
    signature: object


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A step that was recorded; it is itself only.

    Attributes:
        trace: what it did; its resident part is that of the recorded step.
        calls: the calls that it consisted of.
        spans: the ops that ran within each call.
    """

    trace: Trace
    calls: tuple[Call, ...]
    spans: tuple[tuple[int, int], ...]


class Step(abc.ABC):
    """A step in progress."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether the next call belongs to another step."""

    @abc.abstractmethod
    def call(self, call: Call, module: nn.Module | None) -> Any:
        """Return a context in which the forward code of a call runs."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Leave everything as it was before the step."""


@final
class UnknownStep(Step):
    """A step that nobody has seen yet: recorded, and held under the budget by evicting as it runs."""

    def __init__(self, limiter: Limiter, before: Before) -> None:
        self._tracing = Tracing(limiter, before)
        self._calls: list[Call] = []

    @property
    def draft(self) -> Draft:
        """What is known of it."""
        return self._tracing.recorder.draft

    @property
    def is_over(self) -> bool:
        """Whether backward has come to its end, or nothing is left that it could be called for."""
        return not self.draft.open_handles

    @contextmanager
    def call(self, call: Call, module: nn.Module | None) -> Iterator[None]:
        """Record a call. The mode stays on after it, until the step is finished."""
        self._calls.append(call)
        try:
            with self._tracing.span(module):
                yield
        except BaseException:
            self.finish()
            raise

    def finish(self) -> None:
        """Turn the recording off."""
        self._tracing.leave()

    def known(self) -> Known | None:
        """Return what was learnt, if it is a whole step of the kind that a plan can be made for."""
        draft = self.draft
        if draft.interleaved or not any(isinstance(event, Unpack) for event in draft.events):
            return None
        return Known(self._tracing.finished(), tuple(self._calls), tuple(draft.spans))


@final
class _Follower(Recorder):
    """A recorder that compares what runs with what was recorded, and goes online where that differs."""

    def __init__(self, scope: Limiter, names: Sequence[str], policy: Planned) -> None:
        super().__init__(scope)
        self.limiter = scope
        self._policy = policy
        self.departed = False
        self.backward_began = False
        self.ended: Any = None
        """The mark of the moment when autograd released the last value."""
        self._names = names

    def place(self, op: int) -> None:
        """Go to an op of the recorded step."""
        self._sequence = op

    def _compute(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._sequence
        same = number < len(self._names) and self._names[number] == facts.name and not self._policy.departed
        if not same and not self.departed:
            self.depart()
        return super()._compute(facts, args, kwargs)

    def _execute(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.limiter.make_room_for(func, args, kwargs)
        result = self.limiter.retried(lambda: passed_on(func, args, kwargs))
        if self.departed:
            for tensor in tensors_in(result):
                self.limiter.meter.made(tensor.untyped_storage())
        return result

    def depart(self) -> None:
        """Leave the plan: from here on, make room as it is needed."""
        self.departed = True
        for value in list(self._values.values()):
            storage = value.storage() if not value.external and callable(value.storage) else None
            if storage is not None:
                self.limiter.meter.made(storage)
        self.limiter.awake = True

    def _settle_released(self) -> None:
        super()._settle_released()
        if not self.limiter.ledger.made.count:
            self.ended = self.limiter.meter.mark()


@final
class _FollowingHooks(Hooks):
    """Hooks that notice when backward begins."""

    def __init__(self, recorder: _Follower, scope: Limiter) -> None:
        super().__init__(recorder, scope)
        self._follower = recorder

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd the tensor that a handle stands for."""
        self._follower.backward_began = True
        return super().unpack(packed)


class _RetryMode(RecordMode):  # type: ignore[no-untyped-call]
    """Shows the operators of the forward pass to a recorder, and starts those over that run out of memory later."""

    def __init__(self, recorder: _Follower) -> None:
        super().__init__(recorder)
        self._limiter = recorder.limiter
        self.inside = False
        """Code of a planned call is running."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.inside and torch._C._current_graph_task_id() == -1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self._limiter.retried(lambda: passed_on(func, args, kwargs or {}))


@final
class KnownStep(Step):
    """A step that was recorded before, carried out as planned.

    Args:
        limiter: its scope.
        known: what was recorded.
        policy: does what the plan says.
        plan: the plan.
        on_trial: whether it is the first with its plan: then operators of backward, too, are started over if they run
            out of memory, which an allocator can although the bytes suffice.
    """

    def __init__(self, limiter: Limiter, known: Known, policy: Planned, plan: Plan, on_trial: bool) -> None:
        self.known = known
        self.plan = plan
        self.limiter = limiter
        self.began = limiter.meter.mark()
        self._policy = policy
        self._recorder = _Follower(limiter, [op.name for op in known.trace.ops], policy)
        self._hooks = _FollowingHooks(self._recorder, limiter)
        self._mode = _RetryMode(self._recorder)
        self._ambient = Ambient(self._mode) if on_trial else None
        self._plain = all(isinstance(decision, Keep) for decision in plan.decisions.values())
        self._done = 0

    @property
    def departed(self) -> bool:
        """Whether it turned out to be another step than the recorded one."""
        return self._recorder.departed or self._policy.departed

    @property
    def is_over(self) -> bool:
        """Whether all calls were made, or backward has begun."""
        return self._done == len(self.known.calls) or self._recorder.backward_began

    @property
    def ended(self) -> Any:
        """The mark of the moment when autograd released the last value, if that has come."""
        return self._recorder.ended

    @contextmanager
    def call(self, call: Call, module: nn.Module | None) -> Iterator[None]:
        """Carry out a call as planned."""
        number, self._done = self._done, self._done + 1
        if call != self.known.calls[number]:
            self._recorder.depart()
        if self._plain and not self.departed:
            yield  # all is kept: there is nothing to do
            return
        self._recorder.place(self.known.spans[number][0])
        self._mode.inside = True
        try:
            with ExitStack() as stack:
                if self._ambient is None:
                    stack.enter_context(RecordMode(self._recorder))
                else:
                    self._ambient.enter()
                stack.enter_context(saved_tensors_hooks(self._hooks.pack, self._hooks.unpack))
                yield
        finally:
            self._mode.inside = False
            if self._done == len(self.known.calls):
                self._recorder.close()

    def finish(self) -> None:
        """Forget every storage."""
        if self._ambient is not None:
            self._ambient.leave()
        if self._done < len(self.known.calls):
            self._recorder.departed = True
        self._recorder.close()
