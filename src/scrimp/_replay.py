"""Replay: repeating recorded operators to have a dropped value back."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp import _environment
from scrimp._below import with_lazy_views
from scrimp._geometry import fresh, look, private_copy
from scrimp._operators import Frozen
from scrimp._record import tensors_in
from scrimp._record_mode import replaying
from scrimp._rng import drawn_again
from scrimp._streams import used_here, wait_until
from scrimp._value import Blank, Call, Ref, Value
from scrimp.errors import ReplayMismatchError, SourceChangedError


class Replay:
    """One replay: the calls that bring ``target`` back from what is held, worked out but not yet run."""

    def __init__(self, target: Value) -> None:
        self.target = target
        self.missing: dict[Value, None] = {target: None}
        """The values that it will compute because a call reads them, and the target."""
        self.sources: dict[Value, None] = {}
        """The values that it starts from."""
        self._reads: Counter[Value] = Counter()
        calls: dict[Call, None] = {}
        pending = [target]
        while pending:
            value = pending.pop()
            call = value.call
            assert call is not None, "a value that is demanded but not held has a call"
            if call in calls:
                continue
            calls[call] = None
            for source in call.inputs:
                if not source.at_hand:
                    self._reads[source] += 1
                    self.missing[source] = None
                    pending.append(source)
                    continue
                self.sources[source] = None
                if source.tensor is not None and not source.unchanged():
                    raise SourceChangedError(_changed(source, call, target))
        self.calls = sorted(calls, key=lambda call: call.sequence)

    def results(self) -> Iterator[Value]:
        """Yield all values that it can bring back: those it needs, and others that the same calls return."""
        for call in self.calls:
            for ref in call.outputs:
                value = ref()
                if value is not None:
                    yield value

    def bytes_needed(self) -> int:
        """Return the most bytes that its results and intermediates take at once, if none but the target stays."""
        reads = Counter(self._reads)
        level = peak = 0
        for call in self.calls:
            made = [value for ref in call.outputs if (value := ref()) is not None]
            level += sum(value.nbytes for value in made)
            peak = max(peak, level)
            for value in made:
                if value is not self.target and not reads[value]:
                    level -= value.nbytes
            for value in call.inputs:
                if not value.at_hand:
                    reads[value] -= 1
                    if not reads[value] and value is not self.target:
                        level -= value.nbytes
        return peak

    def starts(self) -> Iterator[Value]:
        """Yield the values that it starts from."""
        for call in self.calls:
            for source in call.inputs:
                if source.at_hand:
                    yield source

    def timed(self, keep: Set[Value]) -> tuple[dict[Value, Tensor], float]:
        """Run it and say how many seconds the host spent on that."""
        start = time.perf_counter()
        results = self.run(keep)
        return results, time.perf_counter() - start

    def run(self, keep: Set[Value]) -> dict[Value, Tensor]:
        """Run it, and return the target and those of the other results that are in ``keep``."""
        kept: dict[Value, Tensor] = {}
        passing: dict[Value, Tensor] = {}
        with as_recorded():
            for environment, calls in groupby(self.calls, key=lambda call: call.environment):
                with _environment.restored(environment):
                    for call in calls:
                        self._repeat(call, keep, kept, passing)
        return kept

    def _repeat(
        self,
        call: Call,
        keep: Set[Value],
        kept: dict[Value, Tensor],
        passing: dict[Value, Tensor],
    ) -> None:
        given: dict[Value, Tensor] = {}
        for value in call.inputs:
            given[value] = tensor = self._input(value, kept, passing)
            last_read = value in passing and self._reads[value] == 1
            if value in call.written and not last_read:
                given[value] = private_copy(tensor)
            if not value.at_hand:
                self._reads[value] -= 1
                if self._reads[value] == 0:
                    passing.pop(value, None)
        replaying.call = call
        produced = _repeated(call, given)
        given.clear()
        for ref in call.outputs:
            value_made = ref()
            if value_made is None:
                continue
            if value_made is self.target or value_made in keep:
                kept[value_made] = _checked(value_made, produced)
            elif self._reads[value_made]:
                passing[value_made] = _checked(value_made, produced)

    @staticmethod
    def _input(value: Value, kept: Mapping[Value, Tensor], passing: Mapping[Value, Tensor]) -> Tensor:
        if value.at_hand and value.tensor is not None:
            wait_until(value.ready, value.tensor)
            used_here(value.tensor, value.stream)
            return value.tensor
        return kept[value] if value in kept else passing[value]


def _repeated(call: Call, given: Mapping[Value, Tensor]) -> list[Tensor]:
    """Run the operator again; return its results and then the tensors that it wrote."""
    args = [_argument(noted, given) for noted in call.args]
    kwargs = {name: _argument(noted, given) for name, noted in call.kwargs.items()}
    func = call.operator.func
    if call.draw is None:
        result = func(*args, **kwargs)
    else:
        with drawn_again(call.draw):
            result = func(*args, **kwargs)
    produced = [result] if type(result) is Tensor else list(tensors_in(result))
    return [*produced, *call.operator.written(args, kwargs)] if call.operator.writes else produced


def _argument(noted: Any, given: Mapping[Value, Tensor]) -> Any:
    match noted:
        case Value():
            return given[noted]
        case Ref(value, geometry):
            return look(given[value], geometry)
        case Blank(geometry, device):
            return fresh(geometry, device)
        case Frozen(tensor):
            return tensor.clone()
        case list():
            return [_argument(one, given) for one in noted]
    return noted


def _checked(value: Value, produced: list[Tensor]) -> Tensor:
    tensor = produced[value.index]
    if tensor.stride() != value.geometry.stride or tensor.untyped_storage().nbytes() != value.nbytes:
        raise ReplayMismatchError(
            f"need {value} again in the layout of the forward pass (stride {value.geometry.stride}, {value.nbytes} "
            f"bytes of storage), have stride {tensor.stride()} and {tensor.untyped_storage().nbytes()} bytes; keep the "
            "results of this operator (scrimp.policy.KeepOps)"
        )
    return tensor


@functools.cache
def _keys_above_recording() -> torch._C.DispatchKeySet:
    """Return the dispatch keys that have had their turn when a dispatch mode sees an operator."""
    seen: list[torch._C.DispatchKeySet] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch._C._dispatch_tls_local_exclude_set())
            return func(*args, **(kwargs or {}))

    with Look():  # type: ignore[no-untyped-call]
        torch.ones((), requires_grad=True).exp()
    # Without the snapshot, modes that are active around a replay, say to count memory, cannot be called (torch 2.11).
    return with_lazy_views(seen[-1]).remove(torch._C.DispatchKey.PythonTLSSnapshot)


@contextmanager
def as_recorded() -> Iterator[None]:
    """Run operators below autograd, autocast and function transforms, as they ran when they were recorded."""
    with (
        torch._C._ExcludeDispatchKeyGuard(_keys_above_recording()),
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),  # some kernels look at it: recurrent ones leave out what only backward needs
    ):
        before = replaying.active
        replaying.active = True
        try:
            yield
        finally:
            replaying.active = before
            replaying.call = None


def _changed(source: Value, call: Call, target: Value) -> str:
    return (
        f"backward needs {target} again, which was dropped; its replay runs {call.name} on a "
        f"{str(source.geometry.dtype).removeprefix('torch.')}{list(source.geometry.size)} tensor as it was in the "
        "forward pass, but that tensor has been modified since. Run backward before modifying it, give the region a "
        "copy, or keep the results of the operators that read it (scrimp.policy.KeepOps)"
    )
