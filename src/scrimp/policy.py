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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import final

from torch._ops import OpOverload, OpOverloadPacket

from scrimp._planned import Planned
from scrimp._policy import DROP, KEEP, Answer, Candidate, Decision, Policy
from scrimp.errors import PolicyError
from scrimp.store import Store

__all__ = [
    "DROP",
    "KEEP",
    "Answer",
    "Candidate",
    "Decision",
    "EveryN",
    "Evict",
    "FromFunction",
    "KeepAll",
    "KeepNone",
    "KeepOps",
    "Online",
    "Planned",
    "Policy",
    "Selective",
    "StoreAll",
    "StoreInputs",
    "StoreLargerThan",
    "StoreOps",
    "as_policy",
]


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

    What is evicted goes to ``store`` if there is one and it has room, and is dropped otherwise. With a store of two
    tiers, values are on the device, in host memory or on disk, under a limit of bytes each; what does not fit is
    recomputed.

    >>> import torch, scrimp
    >>> x = torch.randn(256, 256, requires_grad=True)
    >>> with scrimp.session(policy=scrimp.policy.Online(600_000)) as session:
    ...     loss = x.sin().cos().tanh().exp().sum()
    >>> session.statistics.kept.bytes
    524288
    """

    def __init__(self, budget: int, evict: Evict | str = Evict.CHEAPEST, store: Store | None = None) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise PolicyError(f"Online needs a budget in bytes, 0 or more; has {budget!r}")
        try:
            self.evict = Evict(evict)
        except ValueError:
            names = " or ".join(repr(order.value) for order in Evict)
            raise PolicyError(f"Online needs evict={names}, has {evict!r}") from None
        self.budget = budget
        self.store = store

    def __repr__(self) -> str:
        elsewhere = "" if self.store is None else f", store={self.store!r}"
        return f"Online({self.budget}, evict={self.evict.value!r}{elsewhere})"

    def decide(self, value: Candidate) -> Decision:
        """Keep; the session evicts when the budget is full."""
        return KEEP

    def worth(self, value: Candidate) -> float:
        """Time per byte, or age."""
        return float(value.index) if self.evict is Evict.OLDEST else super().worth(value)

    def evicted(self, value: Candidate) -> Store | None:
        """The store, if there is one."""
        return self.store


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
@dataclass(frozen=True, slots=True)
class FromFunction(Policy):
    """A plain callable as a policy."""

    function: Callable[[Candidate], Answer]

    def decide(self, value: Candidate) -> Answer:
        """Ask the function."""
        answer = self.function(value)
        if not isinstance(answer, (Decision, Store)):
            raise PolicyError(
                f"a policy must answer with policy.KEEP or policy.DROP, or with a store; {self.function!r} gave "
                f"{answer!r}"
            )
        return answer


def as_policy(policy: Policy | Callable[[Candidate], Answer]) -> Policy:
    """Return ``policy`` itself, or the policy that a plain callable stands for."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) or not callable(policy):
        raise PolicyError(f"need a Policy, such as KeepNone(), or a callable; have {policy!r}")
    return FromFunction(policy)
