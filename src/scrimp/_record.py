"""Recording: every operator of the forward pass is noted as it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from scrimp import _environment
from scrimp._below import passed_on
from scrimp._blanks import blanks, is_among, without_averages
from scrimp._geometry import (
    geometry_of,
    geometry_of_result,
    is_plain,
    is_strided,
    private_copy,
)
from scrimp._operators import Kind, Operator, operator
from scrimp._rng import draw_before
from scrimp._streams import stream_of
from scrimp._turns import Turns, drop_if_stale
from scrimp._value import Blank, Call, Ref, Shown, Value, secure, share

if TYPE_CHECKING:
    from scrimp._scope import Scope


_NOTHING: Mapping[str, Any] = {}
_CONSTANT = frozenset({bool, float, int, type(None)})
"""Types of arguments that are noted as they are."""
_COMPUTE, _LOOK = Kind.COMPUTE, Kind.LOOK
_STRIDED = torch.strided
_is_grad_enabled = torch._C.is_grad_enabled


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Forgets its storage's entry when the storage dies; until then its address cannot be given to another one."""

    __slots__ = ("address",)
    address: int


class _UnrepeatableError(Exception):
    """This call cannot be noted in a way that allows it to be repeated."""


class Recorder(Turns):
    """What is known of every storage seen since the outermost session of this thread was entered."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.paused = 0
        """How many stretches of code run now that are none of this session's business."""
        self._values: dict[int, Value] = {}
        self._written: list[Value] = []
        """Saved values that the last operator overwrote."""
        self._sequence = 0
        self._environment = _environment.current()

    # -- storages and their values ----------------------------------------------------------------------------------

    def known(self, tensor: Tensor) -> Value | None:
        """Return the value that a tensor looks at if that is certain at first sight."""
        # The first part is what `is_strided` says of most, without a call.
        ordinary = type(tensor) is Tensor and tensor.layout is _STRIDED and not tensor.is_nested
        if not ordinary and not is_strided(tensor):
            return None
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)
        if value is None or tensor._version > value.at_birth or (value.call is not None and not storage.resizable()):
            return None
        return value

    def find(self, tensor: Tensor) -> Value:
        """Return the value that a tensor looks at now; one that was not made under our eyes becomes a source."""
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)
        if value is not None:
            if value.call is not None and not storage.resizable():
                # An array of NumPy's shares its memory, and who has that can write without a word to anybody.
                with self:
                    self._before_write(tensor)
                return self._adopt(tensor, external=value.external)
            version = tensor._version
            if version <= value.at_birth or (version <= value.seen and value.born() is not tensor):
                return value
        # Unknown, or written without a word to the dispatcher: either way nobody can say how to make it again.
        return self._adopt(tensor, external=value is None or value.external)

    def _adopt(self, tensor: Tensor, external: bool) -> Value:
        value = self._enter(tensor, None, 0)
        value.external = external
        if external:
            base = tensor._base
            if base is not None and base.is_leaf and base.requires_grad:
                value.owner = weakref.ref(base)
            self.scope.place_input(value, tensor)
            self._root(value, tensor)
        return value

    def _root(self, value: Value, tensor: Tensor) -> None:
        """Hold a value for as long as the session is open."""
        value.rooted = True
        alias = share(tensor)
        value.hold(alias, alias)

    def _enter(self, tensor: Tensor, call: Call | None, index: int) -> Value:
        """Say that ``tensor``'s storage holds a new value from now on."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        geometry = geometry_of(tensor) if call is None else geometry_of_result(tensor)
        value = Value(tensor, geometry, storage.nbytes(), self.scope, call, index)
        if tensor.is_cuda:
            value.stream = stream_of(value.device)
        ref = _StorageRef(storage, self._forget)
        ref.address = address
        value.storage = ref
        before = self._values.get(address)
        if before is not None:
            before.storage = None
            value.seen = max(value.seen, before.seen)
        self._values[address] = value
        policy = self.scope.control.policy
        if policy.foresees:
            place = (self._sequence - 1, index)
            value.pinned = policy.will_keep(place)
            if policy.will_need(place):
                self._root(value, tensor)
        if call is not None:
            call.outputs.append(weakref.ref(value))
        return value

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, _StorageRef)
        self._values.pop(ref.address, None)

    def close(self) -> None:
        """Forget every storage: nothing more will be recorded. What autograd saved lives on with its handles."""
        with self:
            self.settle_writes()
            self.scope.outbox.flush()
            values = [*self._values.values(), *self.scope.outbox.inputs]
            self.scope.outbox.inputs.clear()
            self._values.clear()
            for value in values:
                storage = value.storage() if value.storage is not None else None
                value.storage = weakref.ref(storage) if storage is not None else None  # one without a tie to us
                value.rooted = False
                if value.demand == 0 and (value.tensor is not None or value.copy is not None):
                    value.let_go()

    # -- operators --------------------------------------------------------------------------------------------------

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and take note of what it reads, makes and writes."""
        facts = operator(func)
        kind = facts.kind
        if kind is _COMPUTE:
            return self._compute(facts, args, kwargs)
        if kind is _LOOK or not is_plain(args[0]):
            return func(*args, **kwargs)
        if kind is Kind.RESTORAGE:
            with self:
                self._before_write(args[0])
            try:
                return func(*args, **kwargs)
            finally:
                self._adopt(args[0], external=False)
        with self:
            value = self.find(args[0])
        result = func(*args, **kwargs)
        value.reshaped_through(args[0])
        return result

    def _compute(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._sequence += 1
        outbox = self.scope.outbox
        if outbox.waits(self._sequence) or self._written:
            with self:
                self.settle_writes()
                outbox.tick(self._sequence)
        if facts.writes:
            return self._compute_and_write(facts, args, kwargs)
        call = self._note(facts, args, kwargs, ())
        result = self._execute(facts.func, args, kwargs)
        if call is not None and not facts.varies and type(result) is Tensor:  # so it is nearly always
            if is_strided(result) and result.untyped_storage()._cdata not in self._values:
                self._enter(result, call, 0)
        else:
            self._made(facts, call, (result,) if type(result) is Tensor else list(tensors_in(result)))
        return result

    def _compute_and_write(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        written = [tensor for tensor in facts.written(args, kwargs) if is_plain(tensor)]
        with self:
            call = self._note(facts, args, kwargs, written)
            external = [self._before_write(tensor) for tensor in written]
        try:
            result = self._execute(facts.func, args, kwargs)
        except BaseException:
            with self:
                for tensor, is_external in zip(written, external, strict=True):
                    self._adopt(tensor, is_external)  # who knows what it has written
            raise
        results = list(tensors_in(result))
        if call is not None and written and facts.varies and not facts.repeats_on(written[0].device):
            call = None
        for index, (tensor, is_external) in enumerate(zip(written, external, strict=True), len(results)):
            value = self._wrote(tensor, None if is_external or facts.averages else call, index, is_external)
            value.written(counted=facts.counted_above)
        self._made(facts, call, results)
        return result

    def _made(self, facts: Operator, call: Call | None, results: Sequence[Tensor]) -> None:
        """Take note of what an operator has returned, as far as that is not memory that was there before."""
        if call is not None and facts.varies and results and not facts.repeats_on(results[0].device):
            call = None
        # What is made from plain tensors is plain if it is strided.
        plain = is_plain if call is None else is_strided
        values = self._values
        for index, tensor in enumerate(results):
            if plain(tensor) and tensor.untyped_storage()._cdata not in values:
                value = self._enter(tensor, call, index)
                if call is None:
                    value.made_at = self._sequence

    def _execute(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that makes something."""
        return passed_on(func, args, kwargs)

    def _note(
        self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Tensor]
    ) -> Call | None:
        """Return how to repeat this call, or None where that cannot be promised.

        Inside ``no_grad`` it never is: that is where custom Functions run their kernels, some of which write to tensors
        unseen by the dispatcher, and what is computed there is seldom worth dropping.
        """
        if not facts.replayable or not _is_grad_enabled():
            return None
        blank: list[Tensor] = []
        if written and not facts.reads_what_it_writes(args):
            blank = blanks(written, list(tensors_in([*args, *kwargs.values()])))
        inputs: dict[Value, None] = {}
        noted_args: list[Any]
        noted_kwargs: Mapping[str, Any] = _NOTHING
        try:
            if facts.snapshots:
                args = facts.with_snapshots(args)
            if blank:
                noted_args = [self._noted_or_blank(argument, blank, inputs) for argument in args]
                if facts.averages:
                    noted_args = without_averages(facts, noted_args)
                noted_kwargs = {name: self._noted_or_blank(one, blank, inputs) for name, one in kwargs.items()}
            else:
                noted_args = []
                for one in args:
                    kind = type(one)
                    if kind is Tensor:
                        noted_args.append(self._ref(one, inputs))
                    else:
                        noted_args.append(one if kind in _CONSTANT else self._noted(one, inputs))
                if kwargs:
                    noted_kwargs = {name: self._noted(one, inputs) for name, one in kwargs.items()}
        except _UnrepeatableError:
            return None
        draw = None
        if facts.random:
            draw = draw_before(args, kwargs)
            if draw is None:
                return None
        if _environment.changed_since(self._environment, facts.picks_kernels):
            self._environment = _environment.current()
        changed = tuple([self.find(tensor) for tensor in written if not is_among(tensor, blank)]) if written else ()
        return Call(facts, noted_args, noted_kwargs, tuple(inputs), changed, draw, self._environment, self._sequence)

    def _noted_or_blank(self, argument: Any, blank: Sequence[Tensor], inputs: dict[Value, None]) -> Any:
        """Like :meth:`_noted`, for a call that overwrites ``blank`` without reading it."""
        if isinstance(argument, Tensor) and is_among(argument, blank):
            return Blank(geometry_of(argument), argument.device)
        if isinstance(argument, (list, tuple)):
            return [self._noted_or_blank(one, blank, inputs) for one in argument]
        return self._noted(argument, inputs)

    def _noted(self, argument: Any, inputs: dict[Value, None]) -> Any:
        """Return what stands for an argument in a recorded call, and add the value that it reads to ``inputs``."""
        if isinstance(argument, Tensor):
            return self._ref(argument, inputs)
        if isinstance(argument, (list, tuple)):
            return [self._noted(one, inputs) for one in argument]
        return argument

    def _ref(self, tensor: Tensor, inputs: dict[Value, None]) -> Value | Ref:
        """Return what stands for a tensor argument: the value that it shows as it was made, or another look at one."""
        value = self.known(tensor)
        if value is None:
            if not is_plain(tensor):
                raise _UnrepeatableError
            value = self.find(tensor)
        if value.scope is not self.scope and value.call is not None and not value.boundary:
            with self:
                self._cross(value, tensor)
        inputs[value] = None
        return value if value.is_what_was_made(tensor) else Ref(value, geometry_of(tensor))

    def _cross(self, value: Value, tensor: Tensor) -> None:
        """Decide about a value that one region made and another reads."""
        value.boundary = True
        around = value.scope.around(self.scope)
        if around is not value.scope:
            value.decided = False  # an inner policy has decided, if at all, for its own region only
        around.decide(value)
        if value.pinned and value.demand and value.tensor is None and value.copy is None:
            value.hold_through(tensor)

    def _before_write(self, tensor: Tensor) -> bool:
        """Save what a coming write destroys, if anybody is going to need it; tell whether the storage is external."""
        value = self._values.get(tensor.untyped_storage()._cdata)
        if value is None:
            return True
        self.scope.outbox.finish(value)
        value.overwritten = True
        value.rooted = False
        if value.demand == 0:
            value.let_go()
        if value.tensor is None:
            if value.handles and value.copy is None:
                self._written.append(value)
            return value.external
        if value.demand == value.handles or (value.call is not None and (value.secured or secure(value))):
            value.stale = True
            drop_if_stale(value)
        else:
            if value.handles and value.witness is not None:
                value.shown = Shown(value.tensor, value.witness, value.version)
            copy = private_copy(value.tensor)
            value.hold(copy, copy)
        return value.external

    def settle_writes(self) -> None:
        """See that autograd is given what it would have, where a saved and dropped value was overwritten.

        Where the version of the tensor that was saved has risen, it would refuse; so what is given does not matter. But
        a write through ``tensor.data`` goes unnoticed, and autograd then uses what has been written.
        """
        while self._written:
            value = self._written.pop()
            born = value.born()
            if born is not None and value.handles and value.tensor is None and born._version == value.at_birth:
                alias = share(born)
                value.hold(alias, alias)
                value.stale = True

    def _wrote(self, tensor: Tensor, call: Call | None, index: int, external: bool) -> Value:
        value = self._enter(tensor, call, index)
        if call is None:
            value.made_at = self._sequence
        if external:
            value.external = True
            self._root(value, tensor)
        return value


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operator returned, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for one in result:
            yield from tensors_in(one)
