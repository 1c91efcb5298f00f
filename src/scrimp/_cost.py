"""How dear it is to have a value back, estimated from shapes alone.

Policies compare costs; they must come out the same in every run, so nothing is measured. An operator takes the longer
of its arithmetic and its memory traffic on a nominal machine of its device type.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from scrimp._value import Blank, Call, Ref, Value


class _Machine(NamedTuple):
    flops: float
    bytes_per_second: float
    launch: float


_NOMINAL = {"cpu": _Machine(1e11, 2e10, 2e-6), "cuda": _Machine(4e14, 2.5e12, 5e-6)}


def call_seconds(call: Call) -> float:
    """Estimate the time of one recorded call; it is worked out once."""
    if call.seconds is None:
        call.seconds = _call_seconds(call)
    return call.seconds


def _call_seconds(call: Call) -> float:
    outputs = [value for ref in call.outputs if (value := ref()) is not None]
    devices = [value.device.type for value in (*call.inputs, *outputs)]
    machine = _NOMINAL.get(devices[0] if devices else "cpu", _NOMINAL["cuda"])
    traffic = sum(value.nbytes for value in (*call.inputs, *outputs))
    return machine.launch + max(_flops(call, outputs) / machine.flops, traffic / machine.bytes_per_second)


def _flops(call: Call, outputs: list[Value]) -> float:
    count = flop_registry.get(call.operator.func.overloadpacket)
    if count is None:
        return float(sum(prod(value.geometry.size) for value in outputs))
    args = [_shape(noted) for noted in call.args]
    kwargs = {name: _shape(noted) for name, noted in call.kwargs.items()}
    if call.operator.func is torch.ops.aten.convolution_backward.default:
        shapes = args[1:3]  # those of input and weight; some of the gradients may not be there
    else:
        shapes = [list(value.geometry.size) for value in outputs]
    return float(count(*args, **kwargs, out_val=shapes[0] if len(shapes) == 1 else tuple(shapes)))


def _shape(noted: Any) -> Any:
    match noted:
        case Value() | Ref() | Blank():
            return list(noted.geometry.size)
        case list():
            return [_shape(one) for one in noted]
    return noted


def replay_seconds(value: Value) -> float:
    """Estimate the time to have ``value`` back from what is held now."""
    return sum(call_seconds(call) for call in _calls_to(value))


def _calls_to(value: Value) -> Iterator[Call]:
    seen: set[Call] = set()
    pending = [value]
    while pending:
        call = pending.pop().call
        if call is None or call in seen:
            continue
        seen.add(call)
        yield call
        pending.extend(source for source in call.inputs if not source.at_hand)
