"""One layer of a chain with a hand-written backward: what is noted of it, and what decides about it. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from scrimp._decision import KEEP, Decision
from scrimp._statistics import State
from scrimp.errors import PolicyError

Forward = Callable[[Any], Any]
Backward = Callable[[Any, Any], Any]


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """What a policy is told of a layer's input."""

    layer_id: Hashable
    index: int
    """How many layers of the chain came before it."""
    nbytes: int
    cost: float
    """Seconds to have the input back from what is kept now."""

    def __getattr__(self, name: str) -> Any:
        raise PolicyError(
            f"a layer of a ManualChain has layer_id, index, nbytes and cost; this policy asks for its {name!r}, which "
            "only values of a session have. Use KeepAll, KeepNone, EveryN, Selective, Online, or a callable"
        )


class ChainPolicy(Protocol):
    """Anything that decides about layers: a policy of :mod:`scrimp.policy` that looks at no operators, or your own."""

    def decide(self, layer: Any, /) -> Decision:
        """Answer for the input of a layer."""


class ChainCopy(Protocol):
    """An input in a store."""

    def fetch(self) -> Any:
        """Return the input, or raise :class:`scrimp.errors.StoreError` where it is lost."""

    def discard(self) -> None:
        """Forget it."""


class ChainStore(Protocol):
    """Where inputs can wait: a store of :mod:`scrimp.store`, for NumPy arrays and tensors, or your own for anything."""

    def put(self, x: Any, /) -> ChainCopy | None:
        """Take an input; None if it cannot be taken."""


HERE = State.KEPT, State.STORED
"""An input in one of these states can be had without computing anything."""


@dataclass(eq=False, slots=True)
class Record:
    """One layer that was run forward and not yet backward."""

    layer_id: Hashable
    index: int
    nbytes: int
    before: Record | None
    """The layer whose output is this one's input, as long as that can be run again."""
    forward_fn: Forward
    seconds: float = 0.0
    state: State = State.ABSENT
    x: Any = None
    copy: ChainCopy | None = None
    standing: bool = field(default=True)
    """Whether it is in the chain still."""


def is_here(record: Record, gone: Container[Record] = ()) -> bool:
    """Tell whether the input can be had without computing anything, were those ``gone`` that are to go."""
    return record.state in HERE and record not in gone


def comes_back(record: Record, gone: Container[Record] = ()) -> bool:
    """Tell whether the input could be computed from another that is there."""
    before = record.before
    while before is not None and not is_here(before, gone):
        before = before.before
    return before is not None


def time_per_byte(layer: Layer) -> float:
    """Say how much a kept input is worth where the policy does not."""
    return layer.cost / max(layer.nbytes, 1)


def decider(policy: ChainPolicy | Callable[[Layer], Decision] | None) -> Callable[[Layer], Decision]:
    """Return what asks a policy, and checks its answer."""
    if policy is None:
        return lambda layer: KEEP
    decide = getattr(policy, "decide", policy)
    if isinstance(policy, type) or not callable(decide):
        raise PolicyError(f"need a policy, such as EveryN(4), or a callable; have {policy!r}")

    def checked(layer: Layer) -> Decision:
        answer = decide(layer)
        if not isinstance(answer, Decision):
            raise PolicyError(f"a policy must answer with policy.KEEP or policy.DROP, {policy!r} gave {answer!r}")
        return answer

    return checked
