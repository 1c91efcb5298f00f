"""What autograd saves: the two hooks that replace tensors by handles and handles by tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from scrimp._compiler import never_compiled
from scrimp._fetch import expect_backward, fetched
from scrimp._geometry import Geometry, geometry_of, is_plain, look, same_bits
from scrimp._record import Recorder
from scrimp._record_mode import step_aside
from scrimp._replay import Replay
from scrimp._scope import Scope
from scrimp._streams import ready_now, wait_until
from scrimp._value import Value, release, secure
from scrimp.errors import ReplayMismatchError, SavedChangedError, saved_changed

_getframe = sys._getframe
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class Handle:
    """Stands for a tensor in autograd's graph. The value's bytes are demanded as long as it lives."""

    __slots__ = ("geometry", "recorder", "value")

    def __init__(self, value: Value, geometry: Geometry | None, recorder: Recorder) -> None:
        self.value = value
        self.geometry = geometry
        self.recorder = recorder

    @never_compiled
    def __del__(self) -> None:
        self.recorder.release_handle(self.value)


class Whole:
    """A handle that simply keeps a tensor which is not just a look at a storage: sparse, nested, quantized, zero."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor._version


class Parts:
    """A handle for a subclass that can take itself apart into plain tensors and be put together again."""

    __slots__ = ("context", "kind", "parts", "size", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.parts = {name: pack(getattr(tensor, name)) for name in names}

    def together(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return the tensor again."""
        parts = {name: unpack(part) for name, part in self.parts.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return tensor


class Hooks:
    """The pair of saved-tensor hooks of one scope."""

    def __init__(self, recorder: Recorder, scope: Scope) -> None:
        self._recorder = recorder
        self._scope = scope

    # -- forward ----------------------------------------------------------------------------------------------------

    @never_compiled
    def pack(self, tensor: Tensor) -> Any:
        """Replace a tensor that autograd saves by a handle."""
        # A custom Function's kernels may have written to what it saves, unseen: that is never replayed.
        return self._packed(tensor, by_function=_getframe(1).f_code is _APPLY)

    def _packed(self, tensor: Tensor, by_function: bool) -> Any:
        recorder = self._recorder
        value = recorder.known(tensor)
        if value is None and not is_plain(tensor):
            if is_traceable_wrapper_subclass(cast(object, tensor)) and not tensor.is_nested:
                return Parts(tensor, lambda part: self._packed(part, by_function))
            return Whole(tensor)
        with recorder:
            if value is None:
                value = recorder.find(tensor)
            self._save(value, tensor, by_function)
            if value.is_what_was_made(tensor):
                return Handle(value, None, recorder)
            geometry = geometry_of(tensor)
            return Handle(value, None if geometry == value.geometry else geometry, recorder)

    def _save(self, value: Value, tensor: Tensor, by_function: bool) -> None:
        scope = self._scope
        if not value.decided and value.call is not None and not by_function:
            (scope if value.scope is scope else value.scope.around(scope)).decide(value)
        if not value.handles and not value.external:
            value.scope.ledger.made.enter(value.nbytes)
        value.handles += 1
        value.demand += 1
        if by_function or value.call is None:
            _keep_for_good(value, tensor)
            value.scope.around(scope).place_opaque(value)
        elif value.tensor is None and value.copy is None:
            keep = value.scope.admit(value) if value.pinned else not (value.secured or secure(value))
            if keep:
                value.hold_through(tensor)
            else:
                value.settle()
            if value.scope.control.verify and value.proof is None:
                value.proof = _copy_of(tensor, value.geometry)

    # -- backward ---------------------------------------------------------------------------------------------------

    @never_compiled
    def unpack(self, packed: Any) -> Tensor:
        """Give autograd the tensor that a handle stands for."""
        step_aside()
        match packed:
            case Parts():
                return packed.together(self.unpack)
            case Whole(tensor=tensor, version=version):
                if tensor._version != version:
                    raise SavedChangedError(saved_changed(f"a {tensor.layout} tensor of {tensor.dtype}"))
                return tensor
        value = packed.value
        with packed.recorder as recorder:
            recorder.settle_writes()
            expect_backward(recorder, value)
            if value.tensor is not None and not value.unchanged():
                raise SavedChangedError(saved_changed(f"a tensor ({value})"))
            if value.shown is not None:
                tensor, witness, version = value.shown
                if witness._version != version:
                    raise SavedChangedError(saved_changed(f"a tensor ({value})"))
            elif value.tensor is not None:
                tensor = value.tensor
                wait_until(value.ready, tensor)
                if value.replayed and _is_for_one_use(value):
                    value.let_go()  # nobody but the caller needs it, and not even the caller to the end of its node
            else:
                there = fetched(value, recorder) if value.is_away else None
                tensor = _bring_back(value, recorder) if there is None else there
            if packed.geometry is None:
                return tensor
            with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
                return look(tensor, packed.geometry)


def _copy_of(tensor: Tensor, geometry: Geometry) -> Tensor:
    with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
        return look(tensor.detach(), geometry).clone()


def _keep_for_good(value: Value, tensor: Tensor) -> None:
    if value.tensor is None and value.copy is None:
        value.hold_through(tensor)
    if value.secured:
        value.secured = False
        assert value.call is not None
        for source in value.call.inputs:
            release(source)
    if value.call is not None:
        value.made_at = value.call.sequence
        value.call = None


def _bring_back(target: Value, recorder: Recorder) -> Tensor:
    replay = _ready_to_run(target, recorder)
    task = torch._C._current_graph_task_id()
    with target.scope.room_for(replay):
        keep = _worth_keeping(replay) if task != -1 else set()
        results, seconds = replay.timed(keep)
    if task == -1:
        _send_back(replay)
    ledger = target.scope.ledger
    ledger.replayed_operators += len(replay.calls)
    ledger.replayed_seconds += seconds
    ready = ready_now(target.device)
    for value, tensor in results.items():
        if value.proof is not None and not same_bits(tensor, value.proof):
            raise ReplayMismatchError(_mismatch(value))
    for value in keep:
        value.hold(results[value], results[value])
        value.ready = ready
        value.replayed = True
        value.passing = value.passes >= 0
        value.scope.offer(value)
    if keep:
        recorder.drop_again_after(task, keep)
    return results[target]


def _ready_to_run(target: Value, recorder: Recorder) -> Replay:
    """Work out a replay, and fetch what it starts from; what is lost has to be replayed as well."""
    while True:
        replay = Replay(target)
        away = [source for source in replay.sources if source.is_away]
        beside = frozenset(replay.sources)
        lost = [source for source in away if fetched(source, recorder, True, beside) is None]
        if not lost:
            return replay


def _send_back(replay: Replay) -> None:
    """Let go of what a replay started from and stores have as well."""
    for source in replay.sources:
        if source.copy is not None and source.replayed:
            source.let_go()


def _worth_keeping(replay: Replay) -> set[Value]:
    """Return what a replay computes that backward is going to ask for as well, as far as budgets allow.

    Those are values that autograd saved, and those where the replay of a region starts; but not what belongs to other
    regions: these are replayed on their own, when their turn comes.
    """
    around = set(replay.target.scope.line())
    wanted = [
        value
        for value in replay.results()
        if value.tensor is None
        and value.copy is None
        and not value.overwritten
        and not (value is replay.target and _is_for_one_use(value))
        and value.scope in around
        and (value.handles or (value.boundary and value.demand))
    ]
    for value in wanted:
        value.passes -= 1
    wanted = [value for value in wanted if value.passes < 0 or value is replay.target]
    # Backward goes from the end to the beginning: of what does not all fit, the latest is needed first.
    wanted.sort(key=lambda value: (value is replay.target, value.call.sequence if value.call else 0), reverse=True)
    room = {scope: scope.room() for scope in around}
    keep = set()
    for value in wanted:
        left = room[value.scope]
        if left is None or left >= value.nbytes:
            keep.add(value)
            room[value.scope] = None if left is None else left - value.nbytes
    return keep


def _is_for_one_use(target: Value) -> bool:
    """Tell whether only the caller needs it: then it goes sooner than its handle.

    What the same call returned as well may be asked for next, and must not be computed together with a second copy.
    """
    return target.demand == 1 and target.call is not None and len(target.call.outputs) == 1


def _mismatch(value: Value) -> str:
    return (
        f"need the bits of {value} as the forward pass computed them, have others from its replay: the operator is not "
        "deterministic, or something that it reads was changed where no version counter shows it (a NumPy view, "
        "tensor.data, a kernel of your own). Keep the results of this operator (scrimp.policy.KeepOps)"
    )
