"""Recording a whole step, forward and backward, as the draft of a trace, while it is held under a budget."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload

from scrimp._answers import Answers
from scrimp._backward_watch import BackwardWatch
from scrimp._draft import Draft, DraftOp
from scrimp._geometry import is_plain
from scrimp._limiter import Limiter
from scrimp._live import users
from scrimp._meter import Before
from scrimp._operators import Operator
from scrimp._record import Recorder, tensors_in
from scrimp._saved import Handle, Hooks, Whole
from scrimp._shortage import Shortage
from scrimp._standing import Standing
from scrimp._trace import Release, Unpack
from scrimp._trace import Value as TracedValue
from scrimp._value import Call, Ref, Value
from scrimp.errors import BudgetError

_SMALL = 512  # what takes no more than this part of the budget is held even though nobody may need it


@final
class StepRecorder(Recorder):
    """A recorder that writes down each operator, in the words of a trace."""

    def __init__(self, scope: Limiter, before: Before) -> None:
        super().__init__(scope)
        self.before = before
        self.found_bytes = 0
        """Bytes of storages that were there before the step, and not known until it used them."""
        self.limiter = scope
        self.draft = Draft()
        self.ids: dict[Value, int] = {}
        self.module = ""
        """The path of the module that is running."""
        self.inside = False
        """Code that a plan can decide about is running."""
        self.failed = False
        """The step did not fit into its budget."""
        self.answers = Answers()
        """What the forward pass was answered, when it asked its data."""
        self.lost: Shortage | None = None
        """Where the step turned out not to fit. What it goes on for from there is to see what it asks its data."""
        self.backward = BackwardWatch(scope, self.draft)
        scope.standing = self.standing
        scope.abandon = self.lose
        self._adopting = False
        self._calls: list[Call | None] = []
        """How to repeat each of the values that the operator made that runs now."""
        self._watched: dict[int, Value] = {}
        """By address, the values of which it is not known yet when the program lets go of them."""
        self._versions: dict[int, list[weakref.ref[Value]]] = {}

    # -- steps that do not fit --------------------------------------------------------------------------------------

    def lose(self, shortage: Shortage) -> bool:
        """Let go of all that backward would need; False, with nothing done, where there is no forward pass to go on."""
        if self.lost is not None or not self.inside or self.draft.events or torch._C._current_graph_task_id() != -1:
            return False
        self.lost = shortage
        with self:
            for value in list(self.ids):
                if value.tensor is not None:
                    value.let_go()
        return True

    def look_on(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of the forward pass of a step that is lost."""
        result = self.backward.between(func, args, kwargs)
        self.answers.note(func, result)
        return result

    def refusal(self) -> BudgetError:
        """Say what a step that is lost would take, by all that was seen of it."""
        assert self.lost is not None, "only a step that is lost is refused"
        return self.lost.error(self.limiter.outlook(self.lost.need))

    def fail(self) -> None:
        """Take note that the step did not fit: whatever runs next is no part of it."""
        self.failed = True
        self.backward.abandon()

    # -- operators --------------------------------------------------------------------------------------------------

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, take note of it, and of what data answered through it."""
        result = super().run(func, args, kwargs)
        self.answers.note(func, result)
        return result

    def _compute(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        draft = self.draft
        if draft.events:
            draft.interleaved = True
        self.look_for_deaths()
        number = len(draft.ops)
        reads = {
            self.ids[self.find(tensor)]: None for tensor in tensors_in([*args, *kwargs.values()]) if is_plain(tensor)
        }
        draft.ops.append(DraftOp(facts.name, self.module, tuple(reads), start=None))
        self._calls.clear()
        result = super()._compute(facts, args, kwargs)
        call = self._calls[0] if self._calls and all(self._calls) else None
        op = draft.ops[number]
        if call is not None:
            still_read = {self.ids[value] for value in call.inputs}
            op.reads = tuple(value for value in reads if value in still_read)
        else:  # what it wrote over is none of its inputs: that was gone before
            op.reads = tuple(value for value in reads if draft.values[value].dies_after in (None, number))
        op.replayable = call is not None
        return result

    def _execute(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        op = self.draft.ops[-1]
        result, (op.start, op.end, op.transient) = self.limiter.timed(func, args, kwargs)
        return result

    def _repeats(self, facts: Operator, device: torch.device) -> bool:
        meter = self.limiter.meter
        return super()._repeats(facts, meter.plays if device == meter.device else device)

    def _ref(self, tensor: Tensor, inputs: dict[Value, None]) -> Value | Ref:
        noted = super()._ref(tensor, inputs)
        value = noted.value if isinstance(noted, Ref) else noted
        gone_for_good = value.call is None and value.tensor is None
        if gone_for_good and value.nbytes * _SMALL <= (self.limiter.budget or 0):
            value.rooted = True  # little enough to hold for those who may have to be replayed from it
            value.hold_through(tensor)
        return noted

    # -- values -----------------------------------------------------------------------------------------------------

    def _enter(self, tensor: Tensor, call: Call | None, index: int) -> Value:
        storage = tensor.untyped_storage()
        address = storage._cdata
        before = self._values.get(address)
        value = super()._enter(tensor, call, index)
        self.ids[value] = len(self.draft.values)
        if self._adopting or (before is not None and before.external):
            self.draft.values.append(TracedValue(value.nbytes, None))
            if before is None and address not in self.before.addresses:
                self._found(tensor)
            return value
        here = value.device == self.limiter.meter.device
        if here:
            self.limiter.meter.made(storage)
        number = len(self.draft.ops) - 1
        self._calls.append(call)
        overwrites = self._supersede(before, call, number)
        self.draft.values.append(TracedValue(value.nbytes if here else 0, number, index, overwrites))
        self._watched[address] = value
        self._versions.setdefault(address, []).append(weakref.ref(value))
        return value

    def _found(self, tensor: Tensor) -> None:
        meter = self.limiter.meter
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            if one is not None and one.device == meter.device and meter.device.type == "cpu":
                self.found_bytes += one.untyped_storage().nbytes()
                meter.found(one.untyped_storage().nbytes())

    def _supersede(self, before: Value | None, call: Call | None, number: int) -> int | None:
        """Write down the end of what was overwritten; return its id if it was also read."""
        if before is None:
            return None
        old = self.ids[before]
        traced = self.draft.values[old]
        if call is not None and before in call.inputs:
            self.draft.values[old] = replace(traced, dies_after=number)
            return old
        # What was written over without being read is as good as memory of its own.
        self.draft.values[old] = replace(traced, dies_after=max(number - 1, traced.op or 0))
        return None

    def _adopt(self, tensor: Tensor, external: bool) -> Value:
        self._adopting = True
        try:
            return super()._adopt(tensor, external)
        finally:
            self._adopting = False

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        address: int = ref.address  # type: ignore[attr-defined]
        value = self._values.get(address)
        self._watched.pop(address, None)
        self._versions.pop(address, None)
        if value is not None and not self.draft.events:
            self.draft.dies(self.ids[value], len(self.draft.ops) - 1)
        super()._forget(ref)

    def look_for_deaths(self) -> None:
        """Find the values that only the session holds any more."""
        if self.draft.events:
            return
        last = len(self.draft.ops) - 1
        for address, value in list(self._watched.items()):
            if value.tensor is not None and users(address) <= self._held(address, value):
                del self._watched[address]
                self.draft.dies(self.ids[value], last)

    def _held(self, address: int, newest: Value) -> int:
        """Return how many tensors of ours look at a storage."""
        versions = self._versions[address]
        if len(versions) == 1:
            return 1 if newest.witness is newest.tensor else 2
        held = {
            id(tensor)
            for ref in versions
            if (value := ref()) is not None
            for tensor in (value.tensor, value.witness)
            if tensor is not None and tensor.untyped_storage()._cdata == address
        }
        return len(held)

    def standing(self) -> Iterator[Standing]:
        """Say what stands on the device now."""
        for part in self.before.parts:
            yield Standing(part.name, "", part.nbytes)
        yield Standing("gradients and other memory of backward", "", self.backward.own_bytes)
        alive = {id(value): value for value in self._values.values()}
        alive |= {id(value): value for value in self.ids if value.tensor is not None}
        for value in alive.values():
            number = self.draft.values[self.ids[value]].op
            if number is not None:
                yield Standing(self.draft.ops[number].name, self.draft.ops[number].module, value.nbytes)

    # -- backward ---------------------------------------------------------------------------------------------------

    def release_handle(self, value: Value) -> None:
        """Write down that autograd needs a value no more in one place."""
        self._write_down(Release, value)
        super().release_handle(value)

    def note_unpack(self, value: Value) -> None:
        """Write down that backward asks for a value."""
        self._write_down(Unpack, value)

    def _write_down(self, kind: type[Unpack] | type[Release], value: Value) -> None:
        number = self.ids[value]
        op = self.draft.values[number].op
        if op is None:
            return
        if kind is Release:
            if not self.draft.events:
                self.draft.forget_save(number)  # a part of the graph that the program did not go on with
                return
            self.draft.open_handles -= 1
        self.look_for_deaths()
        self.backward.close(self.draft.ops[op].module)
        self.draft.events.append(kind(number))


@final
class StepHooks(Hooks):
    """Hooks that write down what is saved, and what is asked for."""

    def __init__(self, recorder: StepRecorder, scope: Limiter) -> None:
        super().__init__(recorder, scope)
        self._step = recorder

    def _packed(self, tensor: Tensor, by_function: bool) -> Any:
        if self._step.lost is not None:
            return None
        if self._step.draft.events and not self._step.inside and torch._C._current_graph_task_id() == -1:
            # Backward has been here, to its end or not: what the program saves now is no part of the step.
            self._step.draft.interleaved |= self._step.draft.open_handles > 0
            return Whole(tensor)
        self._step.draft.packed.append(tensor.numel())
        if torch._C._current_graph_task_id() != -1 and self._step.known(tensor) is None:
            self._step.draft.interleaved = True
            return Whole(tensor)  # made by backward, for a derivative of higher order: it goes with its handle
        return super()._packed(tensor, by_function)

    def _save(self, value: Value, tensor: Tensor, by_function: bool) -> None:
        super()._save(value, tensor, by_function)
        draft, number = self._step.draft, self._step.ids[value]
        if by_function:
            draft.kept_for_good.add(number)
        if draft.values[number].op is not None:
            draft.open_handles += 1
        if draft.events:
            draft.interleaved = True
        elif draft.values[number].op is not None:
            draft.ops[-1].saves.append(number)

    def unpack(self, packed: Any) -> Tensor:
        """Give autograd the tensor that a handle stands for."""
        try:
            if self._step.lost is not None:
                raise self._step.refusal()
            if isinstance(packed, Handle):
                self._step.note_unpack(packed.value)
            return super().unpack(packed)
        except BudgetError:
            self._step.fail()
            raise
