"""What a plan says about a step, and what was measured, for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scrimp._budget import format_bytes
from scrimp._index import index
from scrimp._plan import Decision, Drop, Keep, Plan, Store
from scrimp._simulate import simulate
from scrimp._standing import Standing, kind_of_module, name_moment, standing
from scrimp._trace import Trace

_ROWS = 12
_STANDING = 8
_REMEMBERED = 50


@dataclass(slots=True)
class Measured:
    """What planned steps took: seconds from the beginning to the end of backward, and the peak of those on trial."""

    peak: int | None = None
    """Bytes at the worst moment of the latest step that was watched from end to end."""
    _marks: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def watched(self, peak: int) -> None:
        """Take the peak of a step that was watched; watching takes time, so its time says nothing."""
        self.peak = peak

    def add(self, meter: Any, began: Any, ended: Any) -> None:
        """Add a step's marks; they are read when somebody asks."""
        self._marks.append((meter, began, ended))
        del self._marks[:-_REMEMBERED]

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self._marks)

    @property
    def seconds(self) -> float | None:
        """The median."""
        if not self._marks:
            return None
        self._marks[-1][0].settle()
        return float(median(meter.seconds(began, ended) for meter, began, ended in self._marks))


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of the values that one operator makes in one kind of module."""

    operator: str
    module: str
    kept: int
    dropped: int
    stored: int
    seconds: float
    """Predicted, for running the operator once more for each dropped value."""


@dataclass(frozen=True, slots=True)
class Report:
    """A plan explained. Printing it gives a text."""

    budget: int
    peak: int
    measured_peak: int | None
    """Of the first step that followed the plan; later ones are not watched, which costs them nothing."""
    peak_moment: str
    at_peak: tuple[Standing, ...]
    plain_peak: int
    seconds: float
    plain_seconds: float
    bound_seconds: float
    measured_seconds: float | None
    measured_steps: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        plain = self.plain_seconds or 1.0
        measured = "not yet measured" if self.measured_peak is None else f"measured {format_bytes(self.measured_peak)}"
        lines = [
            f"budget {format_bytes(self.budget)}: predicted peak {format_bytes(self.peak)}, {measured}, plain "
            f"{format_bytes(self.plain_peak)}",
            f"time: predicted {self.seconds * 1e3:.1f} ms, {self.seconds / plain - 1:+.1%} over a plain step; no plan "
            f"of keeping and dropping is below {self.bound_seconds / plain - 1:+.1%}",
        ]
        if self.measured_seconds is not None:
            lines[1] += f"; measured {self.measured_seconds * 1e3:.1f} ms, median of {self.measured_steps} steps"
        lines.append(f"the peak is {self.peak_moment}, where there are:")
        lines += [f"  {format_bytes(part.nbytes):>12}  {_named(part)}" for part in self.at_peak[:_STANDING]]
        lines.append(f"{'operator':<44} {'module':<24} {'kept':>10} {'dropped':>10} {'stored':>10}")
        for row in self.rows[:_ROWS]:
            sizes = " ".join(f"{format_bytes(size):>10}" for size in (row.kept, row.dropped, row.stored))
            lines.append(f"{row.operator:<44} {row.module:<24} {sizes}")
        if len(self.rows) > _ROWS:
            lines.append(f"and {len(self.rows) - _ROWS} more")
        return "\n".join(lines)


def report_on(trace: Trace, plan: Plan, measured: Measured, budget: int) -> Report:
    """Explain a plan for a trace."""
    timeline = simulate(trace, plan)
    moment = timeline.peak_moment
    return Report(
        budget=budget,
        peak=timeline.peak,
        measured_peak=measured.peak,
        peak_moment=name_moment(trace, moment),
        at_peak=standing(trace, timeline, moment),
        plain_peak=simulate(trace).peak,
        seconds=plan.seconds,
        plain_seconds=plan.plain_seconds,
        bound_seconds=plan.bound_seconds,
        measured_seconds=measured.seconds,
        measured_steps=measured.steps,
        rows=_rows(trace, plan),
    )


def _rows(trace: Trace, plan: Plan) -> tuple[Row, ...]:
    sizes: dict[tuple[str, str], Counter[type[Decision]]] = defaultdict(Counter)
    seconds: Counter[tuple[str, str]] = Counter()
    counted = index(trace).size
    for value, decision in plan.decisions.items():
        number = trace.values[value].op
        assert number is not None, "a plan decides about what the step makes"
        op = trace.ops[number]
        key = (op.name, kind_of_module(op.module))
        sizes[key][type(decision)] += counted[value]
        if isinstance(decision, Drop):
            seconds[key] += op.seconds  # type: ignore[assignment]
    rows = [
        Row(name, module, size[Keep], size[Drop], size[Store], float(seconds[name, module]))
        for (name, module), size in sizes.items()
        if size.total()
    ]
    return tuple(sorted(rows, key=lambda row: -(row.kept + row.dropped + row.stored)))


def _named(part: Standing) -> str:
    return f"{part.name} ({part.module})" if part.module else part.name
