"""Policies: they answer keep or drop for each value when autograd first saves it.

A policy is an instance of :class:`Policy` or any callable from :class:`Candidate` to :class:`Decision`:

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch._ops import OpOverload, OpOverloadPacket

from scrimp._cost import replay_seconds
from scrimp._decision import DROP as DROP
from scrimp._decision import KEEP as KEEP
from scrimp._decision import Decision as Decision
from scrimp._plan import Drop, Plan
from scrimp._trace import Trace
from scrimp._value import Value
from scrimp.errors import PolicyError


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
        assert self._value.call is not None
        return self._value.call.sequence - 1, self._value.index

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
    def decide(self, value: Candidate) -> Decision:
        """Answer for a value that autograd saves for the first time."""

    def passes(self, value: Candidate) -> int:
        """Say how many replays may compute a dropped value and let it go again before one retains it."""
        return 0

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
class Planned(Policy):
    """Do what a plan says.

    A value that the traced step did not have in the same place is kept, so that a step that departs from its plan stays
    right; :attr:`departed` says that this happened.
    """

    def __init__(self, trace: Trace, plan: Plan) -> None:
        if plan.fingerprint != trace.fingerprint():
            raise PolicyError("need a plan for this trace, have one for another: scrimp.plan(trace, budget) makes it")
        self._trace = trace
        self._plan = plan
        self._ids = {(value.op, value.output): number for number, value in enumerate(trace.values)}
        self.departed = False
        """Whether a step did something else than the traced one."""

    def __repr__(self) -> str:
        return f"Planned({self._plan})"

    def decide(self, value: Candidate) -> Decision:
        """Look the value up in the plan."""
        return DROP if isinstance(self._decision(value), Drop) else KEEP

    def passes(self, value: Candidate) -> int:
        """Look the value up in the plan."""
        decision = self._decision(value)
        return decision.passes if isinstance(decision, Drop) else 0

    def _decision(self, value: Candidate) -> object:
        op, _ = value.place
        number = self._ids.get(value.place)
        if number is not None:
            same = self._trace.values[number].nbytes == value.nbytes and self._trace.ops[op].name == value.name
            if same:
                return self._plan.decisions.get(number)
        self.departed = True
        return None


@final
@dataclass(frozen=True, slots=True)
class FromFunction(Policy):
    """A plain callable as a policy."""

    function: Callable[[Candidate], Decision]

    def decide(self, value: Candidate) -> Decision:
        """Ask the function."""
        answer = self.function(value)
        if not isinstance(answer, Decision):
            raise PolicyError(
                f"a policy must answer with policy.KEEP or policy.DROP, {self.function!r} gave {answer!r}"
            )
        return answer


def as_policy(policy: Policy | Callable[[Candidate], Decision]) -> Policy:
    """Return ``policy`` itself, or the policy that a plain callable stands for."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) or not callable(policy):
        raise PolicyError(f"need a Policy, such as KeepNone(), or a callable; have {policy!r}")
    return FromFunction(policy)
