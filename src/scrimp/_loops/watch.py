"""Watching a step: which memory from outside it reads and writes, and which generators it draws from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp._below import passed_on
from scrimp._compiler import never_compiled
from scrimp._geometry import is_plain
from scrimp._loops.outside import Outside, address_of, default_generators, sequence_number
from scrimp._operators import Kind, Operator, operator
from scrimp._record import tensors_in
from scrimp.errors import LoopError

aten = torch.ops.aten
_StorageRef = weakref.ref[torch.UntypedStorage]


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enters what the steps of a loop touch into a registry. It is entered once a step, after :meth:`begin`."""

    def __init__(self, outside: Outside) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside = outside
        self.since = sequence_number()
        """Nodes of autograd's graph with smaller numbers are older than the loop, or than the step that runs again."""
        self.finished = False
        """The loop is over: what steps touch now, as they run again, must be known already."""
        self.varies = False
        """An operator ran that may give something else the next time."""
        self.pure = False
        """What runs now may neither draw random numbers nor write to memory from outside."""
        self._given: set[int] = set()
        self._made: dict[int, _StorageRef | None] = {}
        self._left: dict[int, _StorageRef] = {}
        self._left_limit = 64
        self._met: dict[int, weakref.ref[Tensor]] = {}
        self._wrote: list[weakref.ref[Tensor]] = []

    # -- between steps ----------------------------------------------------------------------------------------------

    def begin(self, given: Sequence[Tensor]) -> None:
        """Close the account of the last step, of which nothing lives any more but what it returned or put somewhere.

        ``given`` are the arguments of the next step.
        """
        if self.finished:
            # Backward may run in another thread, as it does on a GPU, and each thread numbers its nodes on its own.
            self.since = sequence_number()
        for address, ref in self._met.items():
            if ref() is None:
                self.outside.forget(address)  # it lived for one step only, as torch.from_numpy(x) does
        self._met.clear()
        for address, storage in self._made.items():
            if storage is not None and storage() is not None:
                self._left[address] = storage
        if len(self._left) > self._left_limit:
            self._left = {address: one for address, one in self._left.items() if one() is not None}
            self._left_limit = 2 * len(self._left) + 64
        self._made = {address_of(tensor): None for tensor in given}
        self._given = set(self._made)
        self.outside.check_nothing_carried()

    def end(self) -> None:
        """Raise if the step wrote values with a history of their own to memory from outside."""
        for ref in self._wrote:
            tensor = ref()
            if tensor is not None and tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self.since:
                raise LoopError(
                    f"a step of the loop writes values that require grad into a tensor of shape {list(tensor.shape)} "
                    "from outside, which gradients cannot follow; return them as an output of the step, or write "
                    "detached ones"
                )
        self._wrote.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Yes would have torch wrap the next method in what keeps the compiler out of it, which costs several
        # microseconds an operator. `never_compiled` does what that is for.
        return False

    def made(self, tensor: Tensor) -> bool:
        """Tell whether the memory of a tensor came from an operator of the step that was watched last."""
        address = address_of(tensor)
        return address in self._made and address not in self._given

    # -- operators --------------------------------------------------------------------------------------------------

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take note of an operator, and run it."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented  # it takes itself apart, and calls operators on its parts
        facts = operator(func)
        if func is aten.lift_fresh.default:  # a literal: the first that the dispatcher sees of it is this
            self._made[address_of(args[0])] = None
        for argument in args:
            if isinstance(argument, Tensor):
                self._read(argument)
            elif isinstance(argument, (list, tuple)):
                for tensor in tensors_in(argument):
                    self._read(tensor)
        for argument in kwargs.values():
            for tensor in tensors_in(argument):
                self._read(tensor)
        if facts.random:
            self._draw(func, args, kwargs)
        if facts.writes or facts.kind is Kind.RESTORAGE:
            self._before_write(facts, args, kwargs)
        result = passed_on(func, args, kwargs)
        if facts.varies and not all(facts.repeats_on(tensor.device) for tensor in tensors_in(result)):
            self.varies = True
        if isinstance(result, Tensor):
            self._make(result)
        else:
            for tensor in tensors_in(result):
                self._make(tensor)
        return result

    def _make(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage() if is_plain(tensor) else None
        address = id(tensor) if storage is None else storage._cdata
        if address not in self._made and address not in self.outside.seen:
            self._made[address] = None if storage is None else weakref.ref(storage)

    def _read(self, tensor: Tensor) -> None:
        address = address_of(tensor)
        if address in self._made:
            if address not in self._given:
                return
        elif address not in self.outside.seen:
            self._meet(address, tensor)
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() < self.since:
            self.outside.sources[node, tensor.output_nr] = tensor

    def _meet(self, address: int, tensor: Tensor) -> None:
        left = self._left.get(address)
        was_made_here = left is not None and left() is not None
        if self.finished and not was_made_here and not self.outside.fleeting:
            raise LoopError(
                f"a step of the loop reads a tensor of shape {list(tensor.shape)} from outside, as it runs again for "
                "backward, that it did not read the first time. Steps must do the same again: call "
                "torch.func.functional_call inside the step, not around the loop, and replace no parameters between "
                "forward and backward"
            )
        if was_made_here:
            self.outside.carried.append(weakref.ref(tensor))
        self.outside.add(address, tensor)
        self._met[address] = weakref.ref(tensor)

    def _draw(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.pure:
            raise LoopError(f"until= must not draw random numbers, and calls {func}; draw in the step, and return them")
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Generator):
                self.outside.meet(argument)
                return
        for generator in default_generators():
            self.outside.meet(generator)

    def _before_write(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if facts.overwrites_in_training is not None and facts.reads_what_it_writes(args):
            return  # running statistics in evaluation mode: not written
        for tensor in [args[0]] if facts.kind is Kind.RESTORAGE else facts.written(args, kwargs):
            address = address_of(tensor)
            if address in self._given:
                raise LoopError(
                    f"a step of the loop writes to its state or to its x ({facts.func} on a tensor of shape "
                    f"{list(tensor.shape)}), which must stay as they are to be used again; use the out-of-place "
                    "operator, or clone() first"
                )
            if address in self._made:
                continue
            if self.pure or facts.kind is Kind.RESTORAGE or not is_plain(tensor):
                raise LoopError(
                    f"{'until=' if self.pure else 'a step of the loop'} must not call {facts.func} on a tensor of "
                    f"shape {list(tensor.shape)} from outside; make that tensor a part of the state"
                )
            if address not in self.outside.written:
                self.outside.write(address, tensor)
            self._wrote.append(weakref.ref(tensor if tensor._base is None else tensor._base))
