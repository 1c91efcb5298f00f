"""Policies: they answer for each value when autograd first saves it: keep it, drop it, or the store where it is to go.

A policy is an instance of :class:`Policy` or any callable from :class:`Candidate` to :class:`Decision`, or to a store:

>>> import torch, scrimp
>>> def keep_small(value: scrimp.policy.Candidate) -> scrimp.policy.Decision:
...     return scrimp.policy.KEEP if value.nbytes < 1024 else scrimp.policy.DROP
>>> x = torch.randn(64, 64, requires_grad=True)
>>> with scrimp.session(policy=keep_small) as session:
...     loss = x.sin().cos().sum()
>>> loss.backward()
>>> session.statistics.replayed_operators
1
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from scrimp._cost import replay_seconds
from scrimp._decision import DROP as DROP
from scrimp._decision import KEEP as KEEP
from scrimp._decision import Decision as Decision
from scrimp._plan import Decision as PlannedDecision
from scrimp._plan import Drop, Plan
from scrimp._plan import Store as PlannedStore
from scrimp._trace import Trace, Unpack
from scrimp._value import Timing, Value
from scrimp.errors import PolicyError
from scrimp.store import Store

Answer = Decision | Store
"""What a policy says: keep, drop, or where to put it."""


class Candidate:
    """What a policy is told of a value. It is good for the call that it is passed to; do not keep it."""

    __slots__ = ("_value",)

    def __init__(self, value: Value) -> None:
        self._value = value

    @property
    def index(self) -> int:
        """How many values of this session were decided before it."""
        return self._value.number

    @property
    def place(self) -> tuple[int, int]:
        """Which operator of the session made it, counted from 0, and which of that operator's results it is."""
        return self._value.place

    @property
    def operator(self) -> OpOverload:
        """The ATen operator that made it."""
        assert self._value.call is not None
        return self._value.call.operator.func

    @property
    def name(self) -> str:
        """The operator's name, such as ``aten.mm.default``."""
        return str(self.operator)

    @property
    def size(self) -> torch.Size:
        """The shape that the operator gave it."""
        return self._value.geometry.size

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self._value.geometry.dtype

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._value.device

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        return self._value.nbytes

    @property
    def cost(self) -> float:
        """Seconds to have it back from what is kept now, estimated from shapes for a nominal machine."""
        return replay_seconds(self._value)


class Policy(abc.ABC):
    """Decides about values."""

    budget: int | None = None
    """Bytes that the session may keep; what is over that is evicted in the order of :meth:`worth`."""

    @abc.abstractmethod
    def decide(self, value: Candidate) -> Answer:
        """Answer for a value that autograd saves for the first time."""

    def passes(self, value: Candidate) -> int:
        """Say how many replays may compute a dropped value and let it go again before one retains it."""
        return 0

    def opaque(self, value: Candidate) -> Store | None:
        """Say where a value goes that autograd saves and that cannot be replayed; None: it is kept.

        It has no ``operator``, ``name`` or ``cost``.
        """
        return None

    def inputs(self) -> Store | None:
        """Say where an activation goes that was made before the session and is used in it; None: it is kept."""
        return None

    def timing(self, value: Candidate) -> Timing | None:
        """Say when a value that is stored goes and comes back; None: as the store sees fit."""
        return None

    def worth(self, value: Candidate) -> float:
        """Say how much a kept value is worth; over the budget, the least worthy is evicted first."""
        return value.cost / max(value.nbytes, 1)


@final
@dataclass(frozen=True, slots=True)
class KeepAll(Policy):
    """Keep everything, as plain autograd does. Operators are not even recorded."""

    def decide(self, value: Candidate) -> Decision:
        """Keep."""
        return KEEP


@final
@dataclass(frozen=True, slots=True)
class KeepNone(Policy):
    """Drop everything that can be replayed exactly: classic checkpointing."""

    def decide(self, value: Candidate) -> Decision:
        """Drop."""
        return DROP


@final
@dataclass(frozen=True, slots=True)
class Selective(Policy):
    """Keep what is dearer to recompute than ``cost_threshold``, in seconds of :attr:`Candidate.cost`."""

    cost_threshold: float

    def decide(self, value: Candidate) -> Decision:
        """Compare the value's cost with the threshold."""
        return KEEP if value.cost > self.cost_threshold else DROP


@final
@dataclass(frozen=True, slots=True)
class EveryN(Policy):
    """Keep every ``n``-th value and drop those between."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise PolicyError(f"EveryN needs n of 1 or more, has {self.n}; KeepNone() drops everything")

    def decide(self, value: Candidate) -> Decision:
        """Look at the value's index."""
        return KEEP if value.index % self.n == 0 else DROP


@final
class KeepOps(Policy):
    """Keep the results of the given ATen operators and drop the rest.

    >>> import torch, scrimp
    >>> policy = scrimp.policy.KeepOps({torch.ops.aten.mm, torch.ops.aten.addmm})
    """

    def __init__(self, operators: Iterable[OpOverload | OpOverloadPacket]) -> None:
        self.operators = frozenset(operators)
        for one in self.operators:
            if not isinstance(one, (OpOverload, OpOverloadPacket)):
                raise PolicyError(f"KeepOps needs operators such as torch.ops.aten.mm, has {one!r}")

    def __repr__(self) -> str:
        return f"KeepOps({{{', '.join(sorted(str(one) for one in self.operators))}}})"

    def decide(self, value: Candidate) -> Decision:
        """Look at the operator that made the value."""
        known = value.operator in self.operators or value.operator.overloadpacket in self.operators
        return KEEP if known else DROP


class Evict(Enum):
    """Which kept value goes first when a session is over its budget."""

    CHEAPEST = "cheapest"
    """The one that costs the least time per byte to have back."""
    OLDEST = "oldest"
    """The one that was made first."""


@final
class Online(Policy):
    """Keep everything until ``budget`` bytes are full, then evict as many values as it takes, and no more.

    >>> import torch, scrimp
    >>> x = torch.randn(256, 256, requires_grad=True)
    >>> with scrimp.session(policy=scrimp.policy.Online(600_000)) as session:
    ...     loss = x.sin().cos().tanh().exp().sum()
    >>> session.statistics.kept.bytes
    524288
    """

    def __init__(self, budget: int, evict: Evict | str = Evict.CHEAPEST) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise PolicyError(f"Online needs a budget in bytes, 0 or more; has {budget!r}")
        try:
            self.evict = Evict(evict)
        except ValueError:
            names = " or ".join(repr(order.value) for order in Evict)
            raise PolicyError(f"Online needs evict={names}, has {evict!r}") from None
        self.budget = budget

    def __repr__(self) -> str:
        return f"Online({self.budget}, evict={self.evict.value!r})"

    def decide(self, value: Candidate) -> Decision:
        """Keep; the session evicts when the budget is full."""
        return KEEP

    def worth(self, value: Candidate) -> float:
        """Time per byte, or age."""
        return float(value.index) if self.evict is Evict.OLDEST else super().worth(value)


@final
@dataclass(frozen=True, slots=True)
class StoreAll(Policy):
    """Store everything that autograd saves."""

    store: Store

    def decide(self, value: Candidate) -> Answer:
        """Store."""
        return self.store

    def opaque(self, value: Candidate) -> Store | None:
        """Store."""
        return self.store


@final
class StoreOps(Policy):
    """Store the results of the given ATen operators and drop the rest.

    >>> import torch, scrimp
    >>> policy = scrimp.policy.StoreOps({torch.ops.aten.mm, torch.ops.aten.addmm}, scrimp.store.Host("8GiB"))
    """

    def __init__(self, operators: Iterable[OpOverload | OpOverloadPacket], store: Store) -> None:
        self.store = store
        self._kept = KeepOps(operators)

    def __repr__(self) -> str:
        return f"StoreOps({self._kept!r}, {self.store!r})"

    def decide(self, value: Candidate) -> Answer:
        """Look at the operator that made the value."""
        return self.store if self._kept.decide(value) is KEEP else DROP


@final
@dataclass(frozen=True, slots=True)
class StoreLargerThan(Policy):
    """Store what takes more than ``nbytes``, and keep the rest."""

    nbytes: int
    store: Store

    def decide(self, value: Candidate) -> Answer:
        """Look at the size of the value's storage."""
        return self.store if value.nbytes > self.nbytes else KEEP

    def opaque(self, value: Candidate) -> Store | None:
        """Look at the size of the value's storage."""
        return self.store if value.nbytes > self.nbytes else None


@final
@dataclass(frozen=True, slots=True)
class StoreInputs(Policy):
    """Drop everything inside, and store what it is replayed from: activations that were computed before.

    This is for regions one after the other. What leads to a gradient and was made outside counts as an activation;
    parameters, buffers and data do not, since others hold them anyway.

    >>> import torch, scrimp
    >>> host = scrimp.store.Host()
    >>> x = torch.randn(64, 64, requires_grad=True)
    >>> for layer in (torch.sin, torch.exp):
    ...     x = scrimp.checkpoint(lambda x, layer=layer: layer(x * 2) * 3, x, policy=scrimp.policy.StoreInputs(host))
    >>> host.statistics.held.count
    1
    """

    store: Store

    def decide(self, value: Candidate) -> Answer:
        """Drop."""
        return DROP

    def inputs(self) -> Store | None:
        """Store."""
        return self.store


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
        return KEEP

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
        if number is not None:
            same = self._trace.values[number].nbytes == value.nbytes and self._trace.ops[op].name == value.name
            if same:
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


@final
@dataclass(frozen=True, slots=True)
class FromFunction(Policy):
    """A plain callable as a policy."""

    function: Callable[[Candidate], Answer]

    def decide(self, value: Candidate) -> Answer:
        """Ask the function."""
        answer = self.function(value)
        if not isinstance(answer, (Decision, Store)):
            raise PolicyError(
                f"a policy must answer with policy.KEEP, policy.DROP or a store, {self.function!r} gave {answer!r}"
            )
        return answer


def as_policy(policy: Policy | Callable[[Candidate], Answer]) -> Policy:
    """Return ``policy`` itself, or the policy that a plain callable stands for."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) or not callable(policy):
        raise PolicyError(f"need a Policy, such as KeepNone(), or a callable; have {policy!r}")
    return FromFunction(policy)
