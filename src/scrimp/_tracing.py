"""Tracing: running a step once to write down what it does, as the data that plans are made from.

The forward pass runs twice. The first time nothing that autograd saves is held, which shows how long each value lives
of its own accord; the second time everything is, and backward shows what it asks for, when, and what it takes itself.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp._geometry import is_plain
from scrimp._operators import Operator
from scrimp._record import Recorder, RecordMode, tensors_in
from scrimp._saved import Handle, Hooks
from scrimp._scope import Control, Scope
from scrimp._trace import Event, Op, Release, Resident, Run, Trace, Unpack
from scrimp._trace import Value as TracedValue
from scrimp._value import Call, Value
from scrimp.errors import TraceError
from scrimp.policy import EveryN


@dataclass(slots=True)
class _Draft:
    """What is known so far of a step."""

    values: list[TracedValue] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    saves: list[list[int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    external_bytes: int = 0
    kept_for_good: set[int] = field(default_factory=set)


class _TracingRecorder(Recorder):
    """A recorder that writes down each operator, in the words of a trace."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.draft = _Draft()
        self.ids: dict[Value, int] = {}
        self._adopting = False
        self._calls: list[Call | None] = []
        """How to repeat each of the values that the operator made that runs now."""

    def _compute(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        draft = self.draft
        number = len(draft.ops)
        reads: dict[int, None] = {}
        for tensor in tensors_in([*args, *kwargs.values()]):
            if tensor.is_cuda:
                raise TraceError("need a step on the CPU, have a CUDA tensor: times are taken by the host's clock")
            if is_plain(tensor):
                reads[self.ids[self.find(tensor)]] = None
        draft.ops.append(Op(str(facts.func), "", tuple(reads), (), 0.0, replayable=False))
        draft.saves.append([])
        self._calls.clear()
        start = time.perf_counter()
        result = super()._compute(facts, args, kwargs)
        seconds = time.perf_counter() - start
        call = self._calls[0] if self._calls and all(self._calls) else None
        if call is not None:
            still_read = {self.ids[value] for value in call.inputs}
            reads = {value: None for value in reads if value in still_read}
        # What it wrote over without reading it, as far as a replay goes, was gone before.
        reads = {value: None for value in reads if draft.values[value].dies_after in (None, number)}
        draft.ops[number] = replace(draft.ops[number], reads=tuple(reads), seconds=seconds, replayable=call is not None)
        return result

    def _enter(self, tensor: Tensor, call: Call | None, index: int) -> Value:
        before = self._values.get(tensor.untyped_storage()._cdata)
        value = super()._enter(tensor, call, index)
        self.ids[value] = len(self.draft.values)
        if self._adopting or (before is not None and before.external):
            self.draft.values.append(TracedValue(value.nbytes, None))
            if before is None:
                self.draft.external_bytes += value.nbytes
            return value
        number = len(self.draft.ops) - 1
        self._calls.append(call)
        overwrites = None
        if before is not None:
            old = self.ids[before]
            if call is not None and before in call.inputs:
                overwrites, last = old, number
            else:  # what it wrote over was not read: as good as memory of its own
                last = max(number - 1, self.draft.values[old].op or 0)
            self.draft.values[old] = replace(self.draft.values[old], dies_after=last)
        self.draft.values.append(TracedValue(value.nbytes, number, index, overwrites))
        return value

    def _adopt(self, tensor: Tensor, external: bool) -> Value:
        self._adopting = True
        try:
            return super()._adopt(tensor, external)
        finally:
            self._adopting = False

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        value = self._values.get(ref.address)  # type: ignore[attr-defined]
        if value is not None:
            number = self.ids[value]
            traced = self.draft.values[number]
            if traced.op is not None:
                self.draft.values[number] = replace(traced, dies_after=max(traced.op, len(self.draft.ops) - 1))
        super()._forget(ref)


class _TracingHooks(Hooks):
    """Hooks that write down what is saved, asked for, and released."""

    def __init__(self, recorder: _TracingRecorder, scope: Scope, backward: _BackwardMode) -> None:
        super().__init__(recorder, scope)
        self._tracing = recorder
        self._backward = backward

    def _save(self, value: Value, tensor: Tensor, by_function: bool) -> None:
        super()._save(value, tensor, by_function)
        number = self._tracing.ids[value]
        if by_function:
            self._tracing.draft.kept_for_good.add(number)
        if self._tracing.draft.values[number].op is not None:
            self._tracing.draft.saves[-1].append(number)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            self._note(Unpack, packed.value)
        return super().unpack(packed)

    def _note(self, kind: type[Unpack] | type[Release], value: Value) -> None:
        number = self._tracing.ids[value]
        if self._tracing.draft.values[number].op is not None:
            self._backward.close()
            self._tracing.draft.events.append(kind(number))


class _BackwardMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures what backward nodes take: time, and bytes of storages that they make."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events = events
        self._level = self._start_level = self._peak = 0
        self._start = 0.0
        self._node: Any = None
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self.close()
            self._node = node
        older = {t.untyped_storage()._cdata for t in tensors_in([*args, *(kwargs or {}).values()]) if is_plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if is_plain(tensor):
                self._made(tensor.untyped_storage(), older)
        return result

    def _made(self, storage: torch.UntypedStorage, older: set[int]) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address in older or address in self._alive:
            return

        def died(_: object) -> None:
            del self._alive[address]
            self._level -= nbytes

        self._alive[address] = weakref.ref(storage, died)
        self._level += nbytes
        self._peak = max(self._peak, self._level)

    def begin(self) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def close(self) -> None:
        """Write down what happened since the last event."""
        now = time.perf_counter()
        net = self._level - self._start_level
        peak = self._peak - self._start_level
        if self._node is not None or net or peak:
            name = type(self._node).__name__ if self._node is not None else "autograd"
            self._events.append(Run(name, "", now - self._start, max(peak, net, 0), net))
        self._node = None
        self._start_level = self._peak = self._level
        self._start = now


def trace(fn: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a training step and write down what it did.

    Run it in the state in which the planned steps begin: where they start without gradients, so must this.

    Args:
        fn: Computes the loss, a tensor of one element. It runs twice, with the same draws of the default generators;
            the second time backward follows. Gradients, and the buffers of a module, are put back afterwards.
        *args: Passed on to it.
        **kwargs: Passed on to it.

    Returns:
        The trace, for :func:`scrimp.plan`. Times are the host's, so the step must run on the CPU. Memory that an
        operator uses within itself, such as a convolution's workspace, is not seen.

    Raises:
        TraceError: when the step does something else the second time, or gives no loss to go backward from.

    >>> import torch, scrimp
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.randn(128, 64)
    >>> seen = scrimp.trace(lambda: model(x).square().mean())
    >>> plan = scrimp.plan(seen, "200 kB")
    >>> with scrimp.session(policy=scrimp.policy.Planned(seen, plan)):
    ...     loss = model(x).square().mean()
    >>> loss.backward()
    """
    with _put_back(fn), torch.random.fork_rng(devices=[]):
        state = torch.default_generator.get_state()
        first, _ = _forward(fn, args, kwargs, None)
        torch.default_generator.set_state(state)
        events: list[Event] = []
        backward = _BackwardMode(events)
        draft, loss = _forward(fn, args, kwargs, backward)
        if [op.name for op in first.ops] != [op.name for op in draft.ops]:
            raise TraceError("need a step that repeats: its second run called other operators than its first")
        draft.events = events
        _go_backward(loss, backward)
    return _finished(first, draft)


def _forward(
    fn: Callable[..., Tensor], args: Any, kwargs: Any, backward: _BackwardMode | None
) -> tuple[_Draft, Tensor | None]:
    """Run the forward pass; without ``backward``, nothing that autograd saves is held."""
    scope = Scope(Control(EveryN(1), verify=False), parent=None)
    recorder = _TracingRecorder(scope)
    if backward is None:
        pack, unpack = (lambda tensor: None), (lambda nothing: nothing)
    else:
        hooks = _TracingHooks(recorder, scope, backward)
        pack, unpack = hooks.pack, hooks.unpack
        _report_releases(recorder, hooks)
        recorder.draft.events = backward._events
    with RecordMode(recorder), saved_tensors_hooks(pack, unpack):
        loss = fn(*args, **kwargs)
    recorder.close()
    return recorder.draft, (loss if backward is not None else None)


def _report_releases(recorder: _TracingRecorder, hooks: _TracingHooks) -> None:
    release = recorder.release_handle

    def noted(value: Value) -> None:
        hooks._note(Release, value)
        release(value)

    recorder.release_handle = noted  # type: ignore[method-assign]


def _go_backward(loss: Tensor | None, backward: _BackwardMode) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TraceError(
            f"need a loss, a tensor of one element that requires grad, to go backward from; have {loss!r:.80}"
        )
    backward.begin()
    with backward:
        torch.autograd.backward(loss)
    backward.close()


@contextmanager
def _put_back(fn: Callable[..., Any]) -> Iterator[None]:
    """Leave a module's buffers and gradients as they were."""
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(module, nn.Module):
        yield
        return
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]


def _finished(first: _Draft, draft: _Draft) -> Trace:
    newest = _newest_versions(draft.values)
    values = []
    for number, value in enumerate(draft.values):
        death = value.dies_after if newest[number] != number else first.values[number].dies_after
        values.append(value if value.op is None else replace(value, dies_after=death))
    ops = [replace(op, saves=()) for op in draft.ops]
    fixed = {draft.values[number].op for number in draft.kept_for_good}
    for number, saves in enumerate(draft.saves):
        for saved in saves:
            # Of an older version, what autograd saved holds the storage, and so the newest one.
            last = newest[saved]
            saved_at = number
            if last != saved:
                saved_at = values[last].op or 0
                fixed.add(saved_at)
            ops[saved_at] = replace(ops[saved_at], saves=(*ops[saved_at].saves, last))
    ops = [replace(op, replayable=op.replayable and number not in fixed) for number, op in enumerate(ops)]
    events = [event if isinstance(event, Run) else replace(event, value=newest[event.value]) for event in draft.events]
    resident = (Resident("parameters, inputs and what else was there before", draft.external_bytes),)
    return Trace(tuple(values), tuple(ops), tuple(events), resident)


def _newest_versions(values: Sequence[TracedValue]) -> list[int]:
    """Return, for each value, the last one that was written into its storage."""
    newest = list(range(len(values)))
    for number in reversed(range(len(values))):
        old = values[number].overwrites
        if old is not None:
            newest[old] = newest[number]
    return newest
