"""What stands on the device at a moment, by name and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ._budget import format_bytes
from ._simulate import Timeline
from ._trace import Release, Run, Trace, Unpack

__all__ = ["Standing", "kind_of_module", "lines_of", "name_moment", "standing"]

_NAMED = 6  # how many things an error names


@dataclass(frozen=True, slots=True)
class Standing:
    """Something that takes bytes at a moment.

    Attributes:
        name: the operator that made it, or what it is.
        module: the module it was made in; empty where there is none.
        nbytes: its bytes, with everything else of the same name and module.
    """

    name: str
    module: str
    nbytes: int


def name_moment(trace: Trace, moment: int) -> str:
    """Where in the step a moment is, in words.

    Example:
        >>> from scrimp._trace import Op
        >>> name_moment(Trace((), (Op("aten.mm", "layers.0", (), (), 1.0),), ()), 0)
        'forward, in aten.mm (layers.0)'
    """
    if moment < len(trace.ops):
        op = trace.ops[moment]
        return f"forward, in {_label(op.name, op.module)}"
    match trace.events[moment - len(trace.ops)]:
        case Run(name, module):
            return f"backward, in {_label(name, module)}"
        case Unpack(value):
            return f"backward, at the replay of {_value(trace, value)}"
        case Release(value):
            return f"backward, after the use of {_value(trace, value)}"


def standing(trace: Trace, timeline: Timeline, moment: int) -> tuple[Standing, ...]:
    """Everything on the device during a moment, largest first; it adds up to the timeline's level there."""
    parts: Counter[tuple[str, str]] = Counter()
    for part in trace.resident:
        parts[part.name, ""] += part.nbytes
    for span in timeline.spans:
        if span.after < moment <= span.until:
            op = trace.ops[trace.values[span.value].op or 0]
            parts[op.name, op.module] += trace.values[span.value].nbytes
    parts["gradients and other memory of backward", ""] += int(timeline.own[moment])
    parts[f"made there: {name_moment(trace, moment)}", ""] += int(timeline.levels[moment]) - parts.total()
    return tuple(Standing(*labels, nbytes) for labels, nbytes in parts.most_common() if nbytes)


def _value(trace: Trace, value: int) -> str:
    op = trace.values[value].op
    return "something from before the step" if op is None else _label(trace.ops[op].name, trace.ops[op].module)


def _label(name: str, module: str) -> str:
    return f"{name} ({module})" if module else name


def lines_of(parts: Iterable[Standing]) -> str:
    """A line for each of the largest things, with what one operator made in many modules in one."""
    modules: dict[str, list[Standing]] = {}
    for part in parts:
        modules.setdefault(part.name, []).append(part)
    lines = []
    for name, same in sorted(modules.items(), key=lambda item: -sum(part.nbytes for part in item[1])):
        where = f" ({same[0].module})" if same[0].module else ""
        total = format_bytes(sum(part.nbytes for part in same))
        lines.append(f"  {total:>12}  {name}{where if len(same) == 1 else f' in {len(same)} modules'}")
    return "\n".join(lines[:_NAMED])


def kind_of_module(path: str) -> str:
    """Replace numbers in a module's path, so that the layers of a model come together.

    >>> kind_of_module("layers.11.mlp.0")
    'layers.*.mlp.*'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
