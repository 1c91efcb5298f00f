"""One training step under a budget: recorded while it is unknown, carried out as planned once it is known."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks

from scrimp._ambient import Ambient
from scrimp._answers import Answers
from scrimp._below import passed_on
from scrimp._compiler import never_compiled
from scrimp._draft import Draft
from scrimp._geometry import is_plain
from scrimp._keeping import KeepingHooks, KeptHandle
from scrimp._limiter import Limiter
from scrimp._meter import Before
from scrimp._operators import Operator
from scrimp._plan import Keep, Plan
from scrimp._record import Recorder, tensors_in
from scrimp._record_mode import OurMode, RecordMode, replaying
from scrimp._saved import Hooks
from scrimp._standing import Standing
from scrimp._statistics import Ledger
from scrimp._trace import Trace, Unpack
from scrimp._tracing import Tracing
from scrimp.errors import BudgetError
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
        packed: elements of the tensors that autograd saved within each call.
    """

    trace: Trace
    calls: tuple[Call, ...]
    spans: tuple[tuple[int, int], ...]
    packed: tuple[tuple[int, ...], ...]


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
        self._packed: list[tuple[int, ...]] = []

    @property
    def draft(self) -> Draft:
        """What is known of it."""
        return self._tracing.recorder.draft

    @property
    def answers(self) -> Answers:
        """What it was answered so far, when it asked its data."""
        return self._tracing.recorder.answers

    @property
    def is_over(self) -> bool:
        """Whether backward has come to its end or failed, or nothing is left that it could be called for."""
        return self._tracing.failed or not self.draft.open_handles

    @contextmanager
    def call(self, call: Call, module: nn.Module | None) -> Iterator[None]:
        """Record a call. The mode stays on after it, until the step is finished."""
        self._calls.append(call)
        first = len(self.draft.packed)
        try:
            with self._tracing.span(module):
                yield
        except BaseException:
            self.finish()
            raise
        self._packed.append(tuple(self.draft.packed[first:]))

    def finish(self) -> None:
        """Turn the recording off."""
        self._tracing.leave()

    def known(self) -> Known | None:
        """Return what was learnt, if it is a whole step of the kind that a plan can be made for."""
        draft = self.draft
        if self._tracing.failed or draft.interleaved or not any(isinstance(event, Unpack) for event in draft.events):
            return None
        return Known(self._tracing.finished(), tuple(self._calls), tuple(draft.spans), tuple(self._packed))


@final
class _Follower(Recorder):
    """A recorder that compares what runs with what was recorded, and goes online where that differs."""

    def __init__(self, scope: Limiter, trace: Trace, policy: Planned) -> None:
        super().__init__(scope)
        self.limiter = scope
        self._policy = policy
        self.departed = False
        self.watch: Callable[[], None]
        """Has the limiter see every operator from now on."""
        self.backward_began = False
        self.failed = False
        """A replay did not fit into the budget."""
        self.ended: Any = None
        """The mark of the moment when autograd released the last value."""
        self._names = [op.name for op in trace.ops]
        scope.standing = self.standing
        self._resident = trace.resident

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
        if self.limiter.awake:
            self.limiter.make_room_for(func, args, kwargs)
        try:
            return passed_on(func, args, kwargs)
        except torch.OutOfMemoryError:
            return self.limiter.retried(func, args, kwargs)

    def standing(self) -> Iterator[Standing]:
        """Say what stands on the device now."""
        known = 0
        for part in self._resident:
            known += part.nbytes
            yield Standing(part.name, "", part.nbytes)
        for value in list(self._values.values()):
            if not value.external and value.storage is not None and value.storage() is not None:
                known += value.nbytes
                yield Standing(value.call.name if value.call else "operators that cannot be repeated", "", value.nbytes)
        yield Standing("gradients and other memory of backward", "", max(self.limiter.meter.level() - known, 0))

    def depart(self) -> None:
        """Leave the plan: from here on, make room as it is needed."""
        self.departed = True
        for value in list(self._values.values()):
            storage = value.storage() if not value.external and callable(value.storage) else None
            if storage is not None:
                self.limiter.meter.made(storage)
        self.limiter.awake = self.limiter.budget is not None
        self.watch()

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
        try:
            return super().unpack(packed)
        except BudgetError:
            self._follower.failed = True
            raise


@final
class _WatchMode(OurMode):  # type: ignore[no-untyped-call]
    """Counts what operators make, forward, backward and in replays, and starts those over that run out of memory."""

    def __init__(self, recorder: _Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._limiter = recorder.limiter

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        over = self._recorder.ended is not None or self._recorder.failed
        if over or not isinstance(func, OpOverload):
            return passed_on(func, args, kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented
        limiter, meter = self._limiter, self._limiter.meter
        if not replaying.active:  # a replay has had room made for all of it
            limiter.make_room_for(func, args, kwargs)
        older = {t.untyped_storage()._cdata for t in tensors_in([*args, *kwargs.values()]) if is_plain(t)}
        result = limiter.retried(func, args, kwargs)
        for tensor in tensors_in(result):
            if is_plain(tensor) and tensor.device == meter.device and tensor.untyped_storage()._cdata not in older:
                meter.made(tensor.untyped_storage())
        return result


@final
class _PlainHooks(KeepingHooks):
    """Hooks of a step of which all is kept. They see when it saves something else than the recorded one.

    Args:
        recorder: of the step.
        hooks: are asked instead from then on.
        depart: is called then.
    """

    def __init__(self, recorder: _Follower, hooks: Hooks, depart: Callable[[], None]) -> None:
        super().__init__(Ledger())
        self._recorder = recorder
        self._hooks = hooks
        self._depart = depart
        self.expected: Iterator[int] = iter(())
        """Elements of the tensors that the running call is going to save."""

    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor that autograd saves."""
        if not self._recorder.departed and next(self.expected, -1) != tensor.numel():
            self._recorder.limiter.meter.found(self._ledger.kept.bytes)
            self._depart()
        return self._hooks.pack(tensor) if self._recorder.departed else super().pack(tensor)

    def unpack(self, handle: Any) -> Tensor:
        """Give autograd the tensor again."""
        self._recorder.backward_began = True
        return super().unpack(handle) if isinstance(handle, KeptHandle) else self._hooks.unpack(handle)

    def forget(self, storage: Any) -> None:
        """Take note that a handle died."""
        super().forget(storage)
        if not self._ledger.made.count and self._recorder.backward_began:
            self._recorder.ended = self._recorder.limiter.meter.mark()


@final
class KnownStep(Step):
    """A step that was recorded before, carried out as planned.

    Args:
        limiter: its scope.
        known: what was recorded.
        policy: does what the plan says.
        plan: the plan.
        on_trial: whether it is one of the first with its plan: then its peak is measured, and not its time.
        watched: whether operators of backward, too, are started over if they run out of memory, which an allocator can
            although the bytes suffice.
    """

    def __init__(
        self, limiter: Limiter, known: Known, policy: Planned, plan: Plan, on_trial: bool, watched: bool
    ) -> None:
        self.known = known
        self.plan = plan
        self.limiter = limiter
        self.on_trial = on_trial
        self._watched = watched
        self.began = limiter.meter.mark()
        self._policy = policy
        watch = self._watch = Ambient(_WatchMode(recorder := _Follower(limiter, known.trace, policy)))
        recorder.watch = watch.enter
        self._recorder = recorder
        self._hooks = _FollowingHooks(recorder, limiter)
        self._record = Ambient(RecordMode(recorder))
        self._plain_hooks = _PlainHooks(recorder, self._hooks, self._depart_from_plain)
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
        if self._plain and not (self._watched or self.departed):
            yield from self._keeping_all(number)
            return
        if self._watched or self.departed:
            self._watch.enter()
        self._recorder.place(self.known.spans[number][0])
        try:
            with RecordMode(self._recorder), saved_tensors_hooks(self._hooks.pack, self._hooks.unpack):
                yield
        finally:
            if self._done == len(self.known.calls):
                self._recorder.close()

    def _keeping_all(self, number: int) -> Iterator[None]:
        hooks = self._plain_hooks
        hooks.expected = iter(self.known.packed[number])
        try:
            with saved_tensors_hooks(hooks.pack, hooks.unpack):
                yield
        finally:
            self._record.leave()

    def _depart_from_plain(self) -> None:
        self._recorder.depart()
        self._record.enter()

    def finish(self) -> None:
        """Forget every storage."""
        self._watch.leave()
        if self._done < len(self.known.calls):
            self._recorder.departed = True
        self._recorder.close()
