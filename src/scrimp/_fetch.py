"""Fetching: bringing values back from stores when backward, or a replay, needs them."""

from __future__ import annotations

import warnings
from collections.abc import Set

import torch
from torch import Tensor

from scrimp._geometry import look
from scrimp._record import Recorder
from scrimp._replay import as_recorded
from scrimp._streams import ready_now, stream_of
from scrimp._value import Value, secure
from scrimp.errors import StoreError, StoreWarning


def expect_backward(recorder: Recorder, asked_for: Value) -> None:
    """Backward asks for a value: begin to fetch those that are asked for after it.

    If its pass is a new one, that is what was stored last; later it is for stores and plans to say.
    """
    outbox = recorder.scope.outbox
    if not outbox.is_used:
        return
    task = torch._C._current_graph_task_id()
    if task == -1:
        return
    with as_recorded():
        if outbox.begins(task):
            recorder.drop_again_after(task, set())
            outbox.before_backward()
        outbox.before_unpacking(asked_for)


def fetched(
    value: Value, recorder: Recorder, for_replay: bool = False, beside: Set[Value] = frozenset()
) -> Tensor | None:
    """Return the content of a value that is away; None where it is lost, but can be replayed.

    Room for it is made, where that is scarce, without taking away the values ``beside`` it.
    It is held from now on until the pass is over, if it will be needed once more.

    Raises:
        StoreError: when it is lost and cannot be replayed.
    """
    copy = value.copy
    assert copy is not None
    value.scope.land(value.nbytes, beside)
    try:
        with as_recorded():
            tensor = look(copy.fetch(), value.geometry)
    except StoreError as error:
        _lost(value, error)
        return None
    value.scope.landed(tensor)
    task = torch._C._current_graph_task_id()
    room = value.scope.room()
    if for_replay or (task != -1 and value.demand > 1 and (room is None or room >= value.nbytes)):
        value.hold(tensor, tensor)
        value.stream = stream_of(value.device)
        value.ready = ready_now(value.device)
        value.replayed = True
        value.scope.offer(value)
        if task != -1:
            recorder.drop_again_after(task, {value})
    return tensor


def _lost(value: Value, error: StoreError) -> None:
    """Fall back on replaying a value."""
    if value.call is None or not (value.secured or secure(value)):
        raise error
    assert value.copy is not None
    value.copy.discard()
    value.copy = value.store = None
    value.pinned = False
    value.settle()
    warnings.warn(StoreWarning(f"{error}. It is recomputed instead"), stacklevel=2)
