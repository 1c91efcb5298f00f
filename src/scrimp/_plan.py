"""A plan: what becomes of each value that autograd saves, as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from ._budget import format_bytes
from ._json import build, convert, read_object, row, write_object
from .errors import PlanError

__all__ = ["Change", "Decision", "Drop", "Keep", "Plan", "Store"]

_FORMAT = "scrimp plan"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """The value stays where it is."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The value is let go when it is first saved, and replayed when backward asks for it.

    Attributes:
        passes: how many times it is computed and let go again before it is retained. With 0, the first replay
            that computes it retains it until its last handle is released. While passes remain, a replay that
            merely passes lets it go after its last use there, and an unpack keeps it only until the next
            release of one of its handles. This is what makes multi-level schedules (Revolve, rotor)
            expressible as a decision per value.
    """

    passes: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """The value is copied to the store when it is first saved, and back before backward asks for it.

    Attributes:
        free_at: the forward op after which the device's bytes go; the op's end waits for the copy.
        prefetch_at: the backward event before which the copy back begins; what needs the value waits for it.
    """

    free_at: int
    prefetch_at: int


Decision = Keep | Drop | Store


@dataclass(frozen=True, slots=True)
class Change:
    """A value that two plans decide differently; ``None`` where a plan says nothing about it."""

    value: int
    before: Decision | None
    after: Decision | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision per saved value, with what it was predicted to cost.

    Attributes:
        fingerprint: of the trace that it is for.
        budget: bytes that the peak had to meet.
        decisions: by value id, for every value that was made and saved during the step.
        peak: predicted bytes at the worst moment of the step, everything included.
        seconds: predicted time of the step.
        plain_seconds: predicted time of the step with everything kept.
        bound_seconds: no plan within the budget can be faster than this: proven, not estimated, given the
            trace.

    Example:
        >>> plan = Plan("0f", 100, {3: Keep(), 4: Drop()}, 90, 1.2, plain_seconds=1.0, bound_seconds=1.1)
        >>> print(plan)
        peak 90 B of 100 B, time +20.0% (no plan below +10.0%); 1 kept, 1 dropped, 0 stored
        >>> Plan("0f", 100, {3: Keep(), 4: Keep()}, 95, 1.0, 1.0, 1.0).diff(plan)
        (Change(value=4, before=Keep(), after=Drop(passes=0)),)
    """

    fingerprint: str
    budget: int
    decisions: Mapping[int, Decision]
    peak: int
    seconds: float
    plain_seconds: float
    bound_seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "decisions", MappingProxyType(dict(self.decisions)))

    @property
    def added_seconds(self) -> float:
        """Predicted time beyond the step with everything kept."""
        return self.seconds - self.plain_seconds

    def diff(self, after: Plan) -> tuple[Change, ...]:
        """The values that ``after`` decides differently, in the order of their ids."""
        return tuple(
            Change(value, self.decisions.get(value), after.decisions.get(value))
            for value in sorted(self.decisions.keys() | after.decisions.keys())
            if self.decisions.get(value) != after.decisions.get(value)
        )

    def __str__(self) -> str:
        kinds = [type(decision) for decision in self.decisions.values()]
        plain = self.plain_seconds or 1.0
        return (
            f"peak {format_bytes(self.peak)} of {format_bytes(self.budget)}, "
            f"time {self.added_seconds / plain:+.1%} (no plan below {self.bound_seconds / plain - 1:+.1%}); "
            f"{kinds.count(Keep)} kept, {kinds.count(Drop)} dropped, {kinds.count(Store)} stored"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON: whole or not at all, readable by its owner alone."""
        scalars = {name: getattr(self, name) for name in self.__slots__ if name != "decisions"}
        decisions = {
            str(value): {"decision": type(decision).__name__, **row(decision)}
            for value, decision in self.decisions.items()
        }
        write_object(path, {"format": _FORMAT, "version": _VERSION, **scalars, "decisions": decisions})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: when the file holds something else.
        """
        content = read_object(path, _FORMAT, _VERSION, PlanError)
        decisions = content.get("decisions")
        if not isinstance(decisions, dict) or not all(key.isdecimal() for key in decisions):
            raise PlanError(f"{path}: decisions: need an object by value id, have {decisions!r}.")
        kinds: dict[str, Any] = {
            "fingerprint": str,
            "budget": int,
            "peak": int,
            "seconds": float,
            "plain_seconds": float,
            "bound_seconds": float,
        }
        return cls(
            decisions={int(key): _decision(item, f"decisions.{key}") for key, item in decisions.items()},
            **{name: convert(kind, content.get(name), name, PlanError) for name, kind in kinds.items()},
        )


def _decision(item: object, where: str) -> Decision:
    kinds: dict[object, type[Decision]] = {"Keep": Keep, "Drop": Drop, "Store": Store}
    if not isinstance(item, dict) or item.get("decision") not in kinds:
        raise PlanError(f"{where}: need a decision that is one of {', '.join(map(str, kinds))}; have {item!r}.")
    return build(kinds[item["decision"]], {key: item[key] for key in item if key != "decision"}, where, PlanError)
