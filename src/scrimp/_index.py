"""What simulator and solvers look up in a trace again and again, computed once.

Plain lists of ints: they are read element by element in Python loops, where NumPy arrays are slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._trace import Release, Trace, Unpack

__all__ = ["NEVER", "Index", "index"]

NEVER = -1


@dataclass(frozen=True, slots=True)
class Index:
    """A trace, turned around.

    Attributes:
        trace: the trace itself.
        moments: number of moments; also the moment after the last.
        owner: per value, the op that makes it; ``NEVER`` for what was there before the step.
        size: per value, the bytes that it counts: 0 for storages that were there before the step.
        fresh: per op, the bytes of the storages that it allocates for its outputs.
        reads: per op, the values it reads that were made during the step.
        outputs: per op, the values it makes.
        readers: per value made during the step, the ops that read it.
        replayable: per op, whether it may be replayed; an op that read a source which was overwritten later
            may not.
        natural_end: per value, the last moment at whose start somebody other than autograd holds it.
        saved_at: per value, the op that first saves it; ``NEVER`` where none does.
        last_release: per value, the moment that closes its last handle (``moments`` if none does); ``NEVER``
            if unsaved.
        unpacks: per value, the moments at which backward asks for it.
        releases: per value, the moments at which handles of it are released.
        decided: the values that a plan decides about: saved, and made during the step.
        droppable: those among them that can be replayed.
        holdable: the values that nobody saves, but that a plan may keep for replays to start from.
    """

    trace: Trace
    moments: int
    owner: list[int]
    size: list[int]
    fresh: list[int]
    reads: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    readers: list[list[int]]
    replayable: list[bool]
    natural_end: list[int]
    saved_at: list[int]
    last_release: list[int]
    unpacks: list[list[int]]
    releases: list[list[int]]
    decided: tuple[int, ...]
    droppable: frozenset[int]
    holdable: frozenset[int]


def index(trace: Trace) -> Index:
    """Turn a trace around."""
    values, ops = trace.values, trace.ops
    end = len(ops) + len(trace.events)
    owner = [NEVER if value.op is None else value.op for value in values]
    outputs: list[list[int]] = [[] for _ in ops]
    for value, maker in enumerate(owner):
        if maker != NEVER:
            outputs[maker].append(value)
    size = _counted(trace, outputs)
    reads = [tuple(value for value in op.reads if owner[value] != NEVER) for op in ops]
    readers: list[list[int]] = [[] for _ in values]
    saved_at = [NEVER] * len(values)
    handles = [0] * len(values)
    for number, op in enumerate(ops):
        for value in reads[number]:
            readers[value].append(number)
        for value in op.saves:
            handles[value] += 1
            if saved_at[value] == NEVER:
                saved_at[value] = number
    unpacks: list[list[int]] = [[] for _ in values]
    releases: list[list[int]] = [[] for _ in values]
    for moment, event in enumerate(trace.events, start=len(ops)):
        match event:
            case Unpack(value):
                unpacks[value].append(moment)
            case Release(value):
                releases[value].append(moment)
    replayable = _replayable(trace)
    decided = tuple(value for value in range(len(values)) if saved_at[value] != NEVER and owner[value] != NEVER)
    return Index(
        trace=trace,
        moments=end,
        owner=owner,
        size=size,
        fresh=[sum(size[value] for value in made if values[value].overwrites is None) for made in outputs],
        reads=reads,
        outputs=[tuple(sorted(made, key=lambda value: values[value].output)) for made in outputs],
        readers=readers,
        replayable=replayable,
        natural_end=[end if value.dies_after is None else value.dies_after for value in values],
        saved_at=saved_at,
        last_release=[
            NEVER if not count else released[-1] if len(released) == count else end
            for count, released in zip(handles, releases, strict=True)
        ],
        unpacks=unpacks,
        releases=releases,
        decided=decided,
        droppable=frozenset(value for value in decided if replayable[owner[value]]),
        holdable=_holdable(trace, size, saved_at, readers, replayable),
    )


def _holdable(
    trace: Trace, size: list[int], saved_at: list[int], readers: list[list[int]], replayable: list[bool]
) -> frozenset[int]:
    """What is not replayable itself is held wherever a replay starts from it; what is overwritten cannot be."""
    overwritten = {value.overwrites for value in trace.values}
    return frozenset(
        number
        for number, value in enumerate(trace.values)
        if value.op is not None
        and size[number]
        and saved_at[number] == NEVER
        and value.dies_after is not None
        and number not in overwritten
        and replayable[value.op]
        and any(replayable[reader] for reader in readers[number])
    )


def _counted(trace: Trace, outputs: list[list[int]]) -> list[int]:
    """Bytes per value; a version written into a storage from before the step is as free as that storage."""
    size = [0 if value.op is None else value.nbytes for value in trace.values]
    before = [value.op is None for value in trace.values]
    for made in outputs:
        for value in made:
            old = trace.values[value].overwrites
            if old is not None and before[old]:
                before[value] = True
                size[value] = 0
    return size


def _replayable(trace: Trace) -> list[bool]:
    overwritten = {value.overwrites for value in trace.values}
    replayable: list[bool] = []
    for op in trace.ops:
        lost = any(
            value in overwritten and (trace.values[value].op is None or not replayable[trace.values[value].op or 0])
            for value in op.reads
        )
        replayable.append(op.replayable and not lost)
    return replayable
