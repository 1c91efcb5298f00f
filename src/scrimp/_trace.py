"""A trace: what one training step did, as plain data.

The words, in the order in which a step meets them:

- A **value** is the content of one storage at one version. Views are no values: they are their storage's.
- An **op** of the forward pass reads values and makes values. One that writes in place reads the old version
  of a storage and makes a new value that ``overwrites`` it.
- Autograd **saves** values while ops run; each save is a handle that is open until it is released.
- Backward is a list of **events**: ``Unpack`` a value, ``Run`` a backward node, ``Release`` a handle.

A **moment** is a number on the step's clock: forward op ``i`` is moment ``i``, and backward event ``j`` is
moment ``len(ops) + j``.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from dataclasses import dataclass
from typing import Self

from ._json import build, convert, read_object, row, write_object
from .errors import TraceError

__all__ = ["Event", "Op", "Release", "Resident", "Run", "Trace", "Unpack", "Value"]

_FORMAT = "scrimp trace"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Value:
    """The content of one storage at one version; its id is its place in ``Trace.values``.

    Attributes:
        nbytes: bytes of the whole storage.
        op: the op that made it; ``None`` for what was there before the step (parameters, inputs), which
            counts nothing.
        output: which output of the op it is.
        overwrites: the value whose storage the op wrote this one into; ``None`` for a storage of its own.
        dies_after: the last forward op during which somebody other than autograd holds it; ``None``: the
            step's end.
    """

    nbytes: int
    op: int | None
    output: int = 0
    overwrites: int | None = None
    dies_after: int | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """An operator of the forward pass.

    Attributes:
        name: what it is called in reports, such as ``"aten.mm"``.
        module: path of the module that ran it.
        reads: the values it reads, without repetition.
        saves: the values that autograd saves while it runs, once per handle.
        seconds: how long it takes, then and when it is replayed.
        transient: bytes it needs at its worst moment beyond its inputs and outputs.
        replayable: whether running it again gives the same bits.
    """

    name: str
    module: str
    reads: tuple[int, ...]
    saves: tuple[int, ...]
    seconds: float
    transient: int = 0
    replayable: bool = True


@dataclass(frozen=True, slots=True)
class Unpack:
    """Backward asks for a saved value."""

    value: int


@dataclass(frozen=True, slots=True)
class Run:
    """A backward node runs.

    Attributes:
        name: what it is called in reports, such as ``"MmBackward0"``.
        module: path of the module whose forward made it.
        seconds: how long it takes, without unpacking.
        peak: bytes at its worst moment above what was there when it began; never negative.
        net: bytes of backward's own (gradients) that it leaves behind, less those that it frees; may be
            negative.
    """

    name: str
    module: str
    seconds: float
    peak: int
    net: int


@dataclass(frozen=True, slots=True)
class Release:
    """A handle of a saved value is released."""

    value: int


Event = Unpack | Run | Release


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that are there before the step and stay: parameters, optimizer state, inputs."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What one training step did. Checked when it is made: a trace that exists is consistent.

    Attributes:
        values: every value, by id.
        ops: the forward pass, in order.
        events: the backward pass, in order.
        resident: what is on the device before the step.
        out_bandwidth: bytes per second to the store (host); 0 without one.
        in_bandwidth: bytes per second back from it.

    Raises:
        TraceError: when the parts contradict each other.

    Example:
        >>> trace = Trace(
        ...     values=(Value(nbytes=4, op=None), Value(nbytes=4, op=0)),
        ...     ops=(Op("aten.exp", "", reads=(0,), saves=(1,), seconds=1e-6),),
        ...     events=(Unpack(1), Run("ExpBackward0", "", seconds=1e-6, peak=4, net=4), Release(1)),
        ... )
        >>> len(trace.fingerprint())
        32
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    events: tuple[Event, ...]
    resident: tuple[Resident, ...] = ()
    out_bandwidth: float = 0.0
    in_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def fingerprint(self) -> str:
        """A digest of what a plan depends on: all but times and bandwidths, which vary from run to run."""
        digest = hashlib.blake2b(digest_size=16)
        for value in self.values:
            digest.update(repr((value.nbytes, value.op, value.output, value.overwrites, value.dies_after)).encode())
        for op in self.ops:
            digest.update(repr((op.name, op.module, op.reads, op.saves, op.transient, op.replayable)).encode())
        for event in self.events:
            timeless = (event.name, event.peak, event.net) if isinstance(event, Run) else event
            digest.update(repr(timeless).encode())
        digest.update(repr(self.resident).encode())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON: whole or not at all, readable by its owner alone."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "resident": [row(part) for part in self.resident],
            "out_bandwidth": self.out_bandwidth,
            "in_bandwidth": self.in_bandwidth,
            "values": [row(value) for value in self.values],
            "ops": [row(op) for op in self.ops],
            "events": [{"event": type(event).__name__, **row(event)} for event in self.events],
        }
        write_object(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a trace that :meth:`save` wrote.

        Raises:
            TraceError: when the file holds something else, or a trace that contradicts itself.
        """
        content = read_object(path, _FORMAT, _VERSION, TraceError)
        rows = {name: content.get(name) for name in ("values", "ops", "events", "resident")}
        for name, items in rows.items():
            if not isinstance(items, list):
                raise TraceError(f"{path}: {name}: need a list, have {items!r}.")
        return cls(
            values=tuple(build(Value, item, f"values[{i}]", TraceError) for i, item in enumerate(content["values"])),
            ops=tuple(build(Op, item, f"ops[{i}]", TraceError) for i, item in enumerate(content["ops"])),
            events=tuple(_event(item, f"events[{i}]") for i, item in enumerate(content["events"])),
            resident=tuple(
                build(Resident, item, f"resident[{i}]", TraceError) for i, item in enumerate(content["resident"])
            ),
            out_bandwidth=convert(float, content.get("out_bandwidth"), "out_bandwidth", TraceError),
            in_bandwidth=convert(float, content.get("in_bandwidth"), "in_bandwidth", TraceError),
        )


def _event(item: object, where: str) -> Event:
    kinds: dict[object, type[Event]] = {"Unpack": Unpack, "Run": Run, "Release": Release}
    if not isinstance(item, dict) or item.get("event") not in kinds:
        raise TraceError(f"{where}: need an event that is one of {', '.join(map(str, kinds))}; have {item!r}.")
    return build(kinds[item["event"]], {key: item[key] for key in item if key != "event"}, where, TraceError)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise TraceError(message)


def _check(trace: Trace) -> None:
    made: set[tuple[int, int]] = set()
    for number, value in enumerate(trace.values):
        _check_value(trace, number, value)
        if value.op is not None:
            _need(
                (value.op, value.output) not in made,
                f"value {number}: output {value.output} of its op is taken.",
            )
            made.add((value.op, value.output))
    overwritten = [value.overwrites for value in trace.values if value.overwrites is not None]
    _need(
        len(overwritten) == len(set(overwritten)),
        "a value is overwritten twice; each write makes a new value.",
    )
    saves: Counter[int] = Counter()
    for number, op in enumerate(trace.ops):
        _check_op(trace, number, op)
        saves.update(op.saves)
    for old in overwritten:
        _need(
            saves[old] == 0,
            f"value {old} is saved and overwritten later: autograd refuses to unpack it. Omit its saves.",
        )
    _check_events(trace, saves)
    for part in trace.resident:
        _need(part.nbytes >= 0, f"resident {part.name!r}: need bytes of at least 0, have {part.nbytes}.")
    for bandwidth in (trace.out_bandwidth, trace.in_bandwidth):
        _need(
            bandwidth >= 0 and math.isfinite(bandwidth),
            f"need a finite bandwidth of at least 0, have {bandwidth}.",
        )


def _check_value(trace: Trace, number: int, value: Value) -> None:
    last = len(trace.ops) - 1
    _need(value.nbytes >= 0, f"value {number}: need bytes of at least 0, have {value.nbytes}.")
    _need(value.op is None or 0 <= value.op <= last, f"value {number}: there is no op {value.op}.")
    _need(
        value.dies_after is None or (value.op or 0) <= value.dies_after <= last,
        f"value {number}: made by op {value.op}, it cannot die after op {value.dies_after} of {last}.",
    )
    if value.overwrites is None:
        return
    _need(value.op is not None, f"value {number}: what is there before the step overwrites nothing.")
    _need(0 <= value.overwrites < len(trace.values), f"value {number}: there is no value {value.overwrites}.")
    old = trace.values[value.overwrites]
    _need(
        value.op is not None and value.overwrites in trace.ops[value.op].reads and old.dies_after == value.op,
        f"value {number}: its op must read value {value.overwrites}, which must die after that op.",
    )
    _need(
        old.nbytes == value.nbytes,
        f"value {number}: shares a storage of {old.nbytes} bytes, has {value.nbytes}.",
    )


def _check_op(trace: Trace, number: int, op: Op) -> None:
    _need(op.seconds >= 0 and math.isfinite(op.seconds), f"op {number}: need seconds, have {op.seconds}.")
    _need(op.transient >= 0, f"op {number}: need transient bytes of at least 0, have {op.transient}.")
    _need(len(set(op.reads)) == len(op.reads), f"op {number}: reads a value twice; name each once.")
    for value in (*op.reads, *op.saves):
        _need(0 <= value < len(trace.values), f"op {number}: there is no value {value}.")
        death = trace.values[value].dies_after
        _need(death is None or death >= number, f"op {number}: value {value} died after op {death}.")
    for value in op.reads:
        maker = trace.values[value].op
        _need(maker is None or maker < number, f"op {number}: reads value {value} before op {maker} made it.")
    for value in op.saves:
        maker = trace.values[value].op
        _need(maker is None or maker <= number, f"op {number}: saves value {value} before op {maker} made it.")


def _check_events(trace: Trace, saves: Counter[int]) -> None:
    handles = Counter(saves)
    for number, event in enumerate(trace.events):
        match event:
            case Run():
                _need(event.seconds >= 0 and math.isfinite(event.seconds), f"event {number}: need seconds.")
                _need(
                    event.peak >= max(event.net, 0),
                    f"event {number}: need a peak of at least 0 and its net bytes.",
                )
            case Unpack(value) | Release(value):
                _need(handles[value] > 0, f"event {number}: value {value} has no open handle.")
                handles[value] -= isinstance(event, Release)
