"""What a policy is: what it is told of a value, and what it answers."""

from __future__ import annotations

import abc

import torch
from torch._ops import OpOverload

from scrimp._cost import replay_seconds
from scrimp._decision import DROP, KEEP, Decision
from scrimp._value import Timing, Value
from scrimp.store import Store

__all__ = ["DROP", "KEEP", "Answer", "Candidate", "Decision", "Policy"]


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

    foresees: bool = False
    """Whether it knows of a value when it is made what will become of it: :meth:`will_keep`, :meth:`will_need`."""

    @abc.abstractmethod
    def decide(self, value: Candidate) -> Answer:
        """Answer for a value that autograd saves for the first time."""

    def will_keep(self, place: tuple[int, int]) -> bool:
        """Say whether a value that has just been made at a :attr:`Candidate.place` is going to be kept."""
        return False

    def will_need(self, place: tuple[int, int]) -> bool:
        """Say whether replays are going to start from a value that nobody saves, and nobody can make again."""
        return False

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

    def evicted(self, value: Candidate) -> Store | None:
        """Say where a kept value goes that is evicted; None: it is dropped."""
        return None

    def timing(self, value: Candidate) -> Timing | None:
        """Say when a value that is stored goes and comes back; None: as the store sees fit."""
        return None

    def worth(self, value: Candidate) -> float:
        """Say how much a kept value is worth; over the budget, the least worthy is evicted first."""
        return value.cost / max(value.nbytes, 1)
