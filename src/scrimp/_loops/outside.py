"""What the steps of a loop touch that was there before it: tensors, their histories, and random generators."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node

from scrimp._geometry import is_plain
from scrimp._value import share
from scrimp.errors import LoopError, SourceChangedError

Source = tuple[Node, int]
"""Where a tensor comes from in autograd's graph: a node, and which of its outputs the tensor is."""


@final
@dataclass(slots=True)
class Seen:
    """A tensor from outside, as the loop found it."""

    alias: Tensor
    """Shares memory and version counter, without a history."""
    version: int


@final
@dataclass(frozen=True, slots=True)
class Written:
    """Memory from outside that a step writes, and a copy of what it was before the loop."""

    memory: Tensor
    """All of it, as bytes, with a version counter of its own: what the loop puts back has not changed for others."""
    first: Tensor


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a step can depend on besides its arguments, at one moment."""

    generators: dict[int, bytes]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    memory: dict[int, Tensor]
    nbytes: int
    """What it holds that the snapshot before it does not."""


@final
@dataclass(slots=True)
class Outside:
    """The registry of one loop."""

    seen: dict[int, Seen] = field(default_factory=dict)
    """By storage."""
    sources: dict[Source, Tensor] = field(default_factory=dict)
    """Tensors that have a history from before the loop."""
    written: dict[int, Written] = field(default_factory=dict)
    """By storage."""
    generators: dict[int, tuple[torch.Generator, bytes]] = field(default_factory=dict)
    """By address, since an operator is given another Python object for one each time. With the state before the loop.
    """
    carried: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Tensors that one step made, and a later one read though they were not in its state."""
    fleeting: bool = False
    """Some tensors from outside live for one step only."""
    python: bool = True
    """Whether steps may draw from Python's generator; the same for NumPy's."""
    numpy: bool = True
    _first: Snapshot | None = None
    _last: Snapshot | None = None

    def __post_init__(self) -> None:
        for generator in default_generators():
            self.meet(generator)

    def meet(self, generator: torch.Generator) -> None:
        """Take note of a generator that a step is about to draw from for the first time."""
        if generator._cdata not in self.generators:  # type: ignore[attr-defined]
            self.generators[generator._cdata] = generator, _state_of(generator)  # type: ignore[attr-defined]

    def add(self, address: int, tensor: Tensor) -> None:
        """Take note of a tensor that a step is about to use for the first time."""
        self.seen[address] = Seen(share(tensor), tensor._version)

    def forget(self, address: int) -> None:
        """Take a tensor out again that was gone when the step that used it was over."""
        del self.seen[address]
        self.written.pop(address, None)
        self.fleeting = True

    def write(self, address: int, tensor: Tensor) -> None:
        """Take note of memory that a step is about to write for the first time."""
        with torch._C._DisableTorchDispatch():  # no operator of the program's
            everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.written[address] = Written(everything, everything.clone())

    def check_unchanged(self) -> None:
        """Raise if a tensor that steps read, and none of them writes, was modified since."""
        for address, one in self.seen.items():
            if address not in self.written and one.alias._version != one.version:
                shape, dtype = list(one.alias.shape), str(one.alias.dtype).removeprefix("torch.")
                raise SourceChangedError(
                    f"backward needs the steps of a loop again, and they read a {dtype}{shape} tensor from outside "
                    "that has been modified since. Run backward before modifying it, or give the loop a copy"
                )

    def check_nothing_carried(self) -> None:
        """Raise if a step left a tensor for a later one beside the state."""
        if any(ref() is None for ref in self.carried):
            raise LoopError(
                "a step of the loop reads a tensor that an earlier step made and left somewhere (an attribute, a list) "
                "and that is gone by now, so the step could not be run again. Make it a part of the state"
            )

    # -- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return all that a step can depend on besides its arguments, as it is now."""
        last, fresh = self._last, 0
        if last is not None and not (self.generators or self.written or self.python or self.numpy):
            return last  # steps depend on nothing
        states: dict[int, bytes] = {}
        for key, (generator, first) in self.generators.items():
            state = _state_of(generator)
            known = last.generators.get(key) if last else first
            if known == state:
                state = known
            else:
                fresh += len(state)
            states[key] = state
        memory = {key: one.memory.clone() for key, one in self.written.items()}
        fresh += sum(one.nbytes for one in memory.values())
        python = random.getstate() if self.python else ()
        numpy = np.random.get_state(legacy=True) if self.numpy else ()
        assert isinstance(numpy, tuple)
        if last is not None:
            python = last.python if last.python == python else python
            numpy = last.numpy if _same_numpy(last.numpy, numpy) else numpy
        self._last = Snapshot(states, python, numpy, memory, fresh)
        if self._first is None:
            self._first = self._last
        return self._last

    def finish(self) -> None:
        """Leave alone from now on whatever no step has drawn from: the loop is over, and its state is as it was."""
        last, first = self.snapshot(), self._first
        assert first is not None
        self.python = last.python is not first.python
        self.numpy = last.numpy is not first.numpy
        for key, (_, before) in list(self.generators.items()):
            if last.generators[key] == before:
                del self.generators[key]

    def put(self, snapshot: Snapshot) -> None:
        """Make everything as it was then."""
        for key, (generator, first) in self.generators.items():
            state = snapshot.generators.get(key, first)
            with torch._C._DisableTorchDispatch():  # fake tensors are no business of a generator
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        for key, one in self.written.items():
            one.memory.copy_(snapshot.memory.get(key, one.first))
        if self.python:
            random.setstate(snapshot.python)
        if self.numpy:
            np.random.set_state(snapshot.numpy)


def default_generators() -> list[torch.Generator]:
    """Return the generators that operators draw from when none is passed."""
    found = [torch.default_generator]
    for name in ("cuda", "xpu", "mps"):
        backend = getattr(torch, name)
        if backend.is_available() and getattr(backend, "is_initialized", lambda: True)():
            found.extend(getattr(backend, "default_generators", ()))
    return found


def _state_of(generator: torch.Generator) -> bytes:
    with torch._C._DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()


def _same_numpy(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[2:] == other[2:] and (not one or np.array_equal(one[1], other[1]))


def sequence_number() -> int:
    """Return the number that autograd gives to the next node that this thread makes."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def address_of(tensor: Tensor) -> int:
    """Return what identifies a tensor's memory; sparse and other tensors without one are identified themselves."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else id(tensor)
