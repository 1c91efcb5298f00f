"""The policy that does what a plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import final

from scrimp._index import index
from scrimp._plan import Decision as PlannedDecision
from scrimp._plan import Drop, Plan
from scrimp._plan import Store as PlannedStore
from scrimp._policy import DROP, KEEP, Answer, Candidate, Policy
from scrimp._simulate import fixed_values, starts_unsaved
from scrimp._trace import Trace, Unpack
from scrimp._value import Timing
from scrimp.errors import PolicyError
from scrimp.store import Store


def _place(trace: Trace, value: int) -> tuple[int, int]:
    made = trace.values[value]
    assert made.op is not None, "what was there before the step has no place in it"
    return made.op, made.output


_LARGEST_BLOCK = 512  # bytes; sizes in a trace are rounded up to the blocks of the device's allocator


def _same_size(traced: int, nbytes: int) -> bool:
    """Tell whether a traced size, rounded to an allocator's blocks, or 0 on a device without a budget, can be this."""
    return not traced or 0 <= traced - nbytes < _LARGEST_BLOCK


@final
class Planned(Policy):
    """Do what a plan says.

    A value that the traced step did not have in the same place is kept, so that a step that departs from its plan stays
    right; :attr:`departed` says that this happened.

    Args:
        trace: The step.
        plan: A plan for it.
        store: Where the values go that the plan stores.
    """

    foresees = True

    def __init__(self, trace: Trace, plan: Plan, store: Store | None = None) -> None:
        if plan.fingerprint != trace.fingerprint():
            raise PolicyError("need a plan for this trace, have one for another: scrimp.plan(trace, budget) makes it")
        stored = [value for value, decision in plan.decisions.items() if isinstance(decision, PlannedStore)]
        if stored and store is None:
            raise PolicyError(
                f"need a store for the {len(stored)} values that this plan stores, have none: "
                "Planned(trace, plan, scrimp.store.Host())"
            )
        self.store = store
        self._trace = trace
        self._plan = plan
        self._ids = {(value.op, value.output): number for number, value in enumerate(trace.values)}
        self._timings = _timings(trace, {value: plan.decisions[value] for value in stored})
        facts = index(trace)
        self._decided = frozenset(facts.decided)
        fixed = fixed_values(facts, plan.decisions)
        self._kept = {_place(trace, value) for value in facts.decided if fixed[value]}
        self._needed = {_place(trace, value) for value in starts_unsaved(facts, plan.decisions)}
        self.departed = False
        """Whether a step did something else than the traced one."""

    def __repr__(self) -> str:
        return f"Planned({self._plan})"

    def decide(self, value: Candidate) -> Answer:
        """Look the value up in the plan."""
        number = self._number(value)
        match None if number is None else self._plan.decisions.get(number):
            case PlannedStore() if self.store is not None:
                return self.store
            case Drop():
                return DROP
            case None if number is not None and self._is_forgotten(number):
                return DROP
        return KEEP

    def _is_forgotten(self, number: int) -> bool:
        """Tell whether a value was saved for a part of the graph that the traced step did not go on with."""
        op = self._trace.values[number].op
        return number not in self._decided and op is not None and self._trace.ops[op].replayable

    def will_keep(self, place: tuple[int, int]) -> bool:
        """Look the place up in the plan."""
        return place in self._kept

    def will_need(self, place: tuple[int, int]) -> bool:
        """Look the place up among those that replays start from."""
        return place in self._needed

    def passes(self, value: Candidate) -> int:
        """Look the value up in the plan."""
        number = self._number(value)
        decision = None if number is None else self._plan.decisions.get(number)
        return decision.passes if isinstance(decision, Drop) else 0

    def opaque(self, value: Candidate) -> Store | None:
        """Look the value up in the plan."""
        return None if self._timings.get(self._ids.get(value.place, -1)) is None else self.store

    def timing(self, value: Candidate) -> Timing | None:
        """Look the value up in the plan."""
        return self._timings.get(self._ids.get(value.place, -1))

    def _number(self, value: Candidate) -> int | None:
        op, _ = value.place
        number = self._ids.get(value.place)
        same_op = number is not None and self._trace.ops[op].name == value.name
        if number is not None and same_op and _same_size(self._trace.values[number].nbytes, value.nbytes):
            return number
        self.departed = True
        return None


def _timings(trace: Trace, stored: Mapping[int, PlannedDecision]) -> dict[int, Timing]:
    """Translate moments into what a session sees: the operators of forward, and in backward what is unpacked.

    A copy that is to come back before some event does so at the next unpacking of a value that a session recognises;
    never earlier, so that it takes no memory before its time.
    """
    places: list[tuple[tuple[int, int] | None, int]] = [(None, 0)] * (len(trace.events) + 1)
    turns = Counter(event.value for event in trace.events if isinstance(event, Unpack))
    for number in range(len(trace.events) - 1, -1, -1):
        event = trace.events[number]
        places[number] = places[number + 1]
        if isinstance(event, Unpack):
            value = trace.values[event.value]
            if value.op is not None and trace.ops[value.op].replayable:
                places[number] = (value.op, value.output), turns[event.value]
            turns[event.value] -= 1
    return {
        value: Timing(decision.free_at, *places[decision.prefetch_at])
        for value, decision in stored.items()
        if isinstance(decision, PlannedStore)
    }
