"""Layers with a hand-written backward: which inputs are kept, and how the others come back. No torch here."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, final

from scrimp._budget import Budget, format_bytes, parse_budget
from scrimp._decision import KEEP, Decision
from scrimp._loops.schedule import sweep
from scrimp._statistics import Ledger, State, Statistics
from scrimp.errors import BudgetError, ChainError, LayerOrderError, MissingInputError, PolicyError, UnknownLayerError

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


@dataclass(eq=False, slots=True)
class _Record:
    """One layer that was run forward and not yet backward."""

    layer_id: Hashable
    index: int
    nbytes: int
    before: _Record | None
    """The layer whose output is this one's input, as long as that can be run again."""
    forward_fn: Forward
    seconds: float = 0.0
    state: State = State.ABSENT
    x: Any = None
    standing: bool = field(default=True)
    """Whether it is in the chain still."""


@final
class ManualChain:
    """A chain of layers whose forward and backward you write yourself, in NumPy, CuPy, Fortran or anything else.

    Backward needs the input of each layer. The chain keeps those that the policy and the budget allow, and computes the
    others again from the nearest kept one upstream, with the functions that forward was given. The first input, from
    which everything can be computed, is always kept.

    Args:
        policy: Decides about the input of each layer: one of :mod:`scrimp.policy` that looks at no operators
            (``KeepAll``, ``KeepNone``, ``EveryN``, ``Selective``, ``Online``), or a callable from :class:`Layer` to
            ``KEEP`` or ``DROP``. By default everything is kept that the budget has room for.
        budget: Bytes that kept inputs may have together; over it, the least worthy go: those that are the cheapest per
            byte to have back, unless the policy says otherwise (``Online(..., evict="oldest")``).

    Example:
        >>> import numpy as np, scrimp
        >>> chain = scrimp.ManualChain(policy=scrimp.policy.EveryN(4))
        >>> x = np.linspace(0.0, 1.0, 5)
        >>> for layer in range(10):
        ...     x = chain.forward(layer, x, np.sin)
        >>> chain.memory_usage  # the inputs of layers 0, 4 and 8
        120
        >>> grad = np.ones(5)
        >>> for layer in reversed(range(10)):
        ...     grad = chain.backward(layer, grad, np.sin, lambda x, grad: np.cos(x) * grad)
        >>> chain.memory_usage
        0

    All methods can be called from any thread. Calls of ``forward`` and ``backward`` run one after the other; everything
    else answers at once, also while a layer is being computed.
    """

    def __init__(
        self, policy: ChainPolicy | Callable[[Layer], Decision] | None = None, budget: Budget | None = None
    ) -> None:
        self._decide = _decider(policy)
        self._worth: Callable[[Layer], float] = getattr(policy, "worth", _time_per_byte)
        self._budget: int | None = getattr(policy, "budget", None)
        if budget is not None:
            self._budget = parse_budget(budget)
        self._enabled = True
        self._turn = threading.RLock()  # held while a layer is computed; never waited for with the other one held
        self._lock = threading.RLock()  # guards what is below; never held while a function of the user's runs
        self._records: dict[Hashable, _Record] = {}
        self._latest: tuple[Callable[[], Any], _Record] | None = None
        self._ledger = Ledger()

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, layer_id: Hashable, x: Any, forward_fn: Forward, cost: float | None = None) -> Any:
        """Run a layer, ``forward_fn(x)``, and return what it returns.

        Args:
            layer_id: Names the layer; anything hashable that is not in the chain yet.
            x: Its input, of any type with ``nbytes``; do not write to it before the layer's backward. If it is the very
                object that the layer before returned, it can be computed again; otherwise a new chain begins here, and
                it is always kept.
            forward_fn: Computes the output. It may be called again during backward and must then give the same.
            cost: Seconds that it takes, for policies that ask; measured by default.

        Raises:
            LayerOrderError: The chain has a layer of this name.
            BudgetError: The budget has no room for an input that has to be kept.
        """
        with self._turn:
            record = self._new(layer_id, x, forward_fn)
            start = time.perf_counter()
            y = forward_fn(x)
            record.seconds = time.perf_counter() - start if cost is None else cost
            with self._lock:
                self._add(record, x)
                self._latest = _reference(y), record
            return y

    def _new(self, layer_id: Hashable, x: Any, forward_fn: Forward) -> _Record:
        try:
            nbytes = operator.index(x.nbytes)
        except (AttributeError, TypeError):
            raise ChainError(
                f"layer {layer_id!r} needs an input with nbytes, such as a NumPy array; have a {type(x).__name__}. "
                "Wrap it in a class that has nbytes"
            ) from None
        with self._lock:
            if layer_id in self._records:
                raise LayerOrderError(
                    f"layer {layer_id!r} is in the chain already; run its backward, remove() it, or clear() the chain, "
                    "or give each use of a layer a name of its own"
                )
            before = None
            if self._latest is not None:
                output, made_by = self._latest
                before = made_by if made_by.standing and output() is x else None
            if before is None:
                self._check_room(nbytes)
            return _Record(layer_id, len(self._records), nbytes, before, forward_fn)

    def _check_room(self, nbytes: int) -> None:
        """Raise if an input that cannot be computed again has no room beside the others of that kind."""
        needed = nbytes + sum(one.nbytes for one in self._kept() if not _comes_back(one))
        if self._budget is not None and needed > self._budget:
            raise BudgetError(
                f"inputs that cannot be computed again have {format_bytes(needed)} together, the budget is "
                f"{format_bytes(self._budget)}; raise it to that at least",
                smallest=needed,
            )

    def _add(self, record: _Record, x: Any) -> None:
        if record.before is not None and not record.before.standing:
            record.before = None  # removed by another thread meanwhile
        wanted = record.before is None or not self._enabled or self._decide(self._layer(record)) is KEEP
        fits = wanted and self._make_room(record)
        self._records[record.layer_id] = record
        self._ledger.made.enter(record.nbytes)
        if fits:
            self._set(record, State.KEPT, x)
        else:
            self._set(record, State.EVICTED if wanted else State.DROPPED, None)

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, layer_id: Hashable, grad: Any, forward_fn: Forward, backward_fn: Backward) -> Any:
        """Run a layer backward, ``backward_fn(x, grad)``, and return what it returns; the layer leaves the chain.

        Args:
            layer_id: The last layer in the chain.
            grad: The gradient with respect to the layer's output.
            forward_fn: The layer's function; it takes the place of the one given to forward.
            backward_fn: Takes the layer's input and ``grad``, and returns the gradient with respect to the input.

        Raises:
            UnknownLayerError: The chain has no such layer.
            LayerOrderError: It is not this layer's turn.
            MissingInputError: The layer's input is not kept, and neither is any from which it could be computed.
        """
        with self._turn:
            with self._lock:
                record = self._find(layer_id)
                last = next(reversed(self._records))
                if last != layer_id:
                    raise LayerOrderError(
                        f"layers run backward from the last to the first: it is the turn of {last!r}, have {layer_id!r}"
                    )
                record.forward_fn = forward_fn
            grad_input = backward_fn(self._input_of(record), grad)
            with self._lock:
                if record.standing:
                    self._forget(record)
            return grad_input

    def _input_of(self, record: _Record) -> Any:
        """Return the layer's input, computing it from the nearest one that is kept."""
        with self._lock:
            path = self._path(record)
            x = path[0].x
            retain = self._worth_retaining(path)
        for one, following in pairwise(path):
            start = time.perf_counter()
            x = one.forward_fn(x)
            seconds = time.perf_counter() - start
            with self._lock:
                self._ledger.replayed_operators += 1
                self._ledger.replayed_seconds += seconds
                if following in retain and following.standing and self._has_room(following.nbytes):
                    self._set(following, State.KEPT, x)
        return x

    @staticmethod
    def _path(record: _Record) -> list[_Record]:
        """Return the layers from the nearest kept input down to ``record``."""
        path = [record]
        while path[-1].state is not State.KEPT:
            before = path[-1].before
            if before is None:
                raise MissingInputError(
                    f"the input of layer {record.layer_id!r} is not kept; it could be computed from that of "
                    f"{path[-1].layer_id!r}, but that is not kept either, and what made it was removed. Remove layers "
                    "from the end of the chain only"
                )
            path.append(before)
        path.reverse()
        return path

    def _worth_retaining(self, path: list[_Record]) -> set[_Record]:
        """Choose the inputs on the way that are kept, spread such that the fewest layers have to run again later."""
        between = path[1:-1]
        if self._budget is None:
            return set(between)
        size = max(max((one.nbytes for one in between), default=1), 1)
        room = (self._budget - self._ledger.kept.bytes) // size
        return {path[step] for step in sweep(len(path), 1 + room) if 0 < step < len(path) - 1}

    # -- the user's view --------------------------------------------------------------------------------------------

    def __contains__(self, layer_id: Hashable) -> bool:
        """Whether the chain has this layer: it was run forward, and not yet backward."""
        with self._lock:
            return layer_id in self._records

    def __len__(self) -> int:
        """How many layers the chain has."""
        with self._lock:
            return len(self._records)

    def has(self, layer_id: Hashable) -> bool:
        """Whether the input of this layer is kept, so that its backward need compute nothing again."""
        with self._lock:
            return layer_id in self._records and self._records[layer_id].state is State.KEPT

    def remove(self, layer_id: Hashable) -> None:
        """Take a layer out of the chain, with its input. Inputs behind it can then not be computed through it."""
        with self._lock:
            self._forget(self._find(layer_id))

    def clear(self) -> None:
        """Take all layers out of the chain."""
        with self._lock:
            for record in reversed(list(self._records.values())):
                self._forget(record)
            self._latest = None

    @property
    def enabled(self) -> bool:
        """Whether the policy is asked. While it is False, all inputs are kept that the budget has room for."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    @property
    def memory_usage(self) -> int:
        """Bytes of all inputs that are kept."""
        return self._ledger.kept.bytes

    @property
    def budget(self) -> int | None:
        """Bytes that kept inputs may have together; assign any size, also while there are layers in the chain."""
        return self._budget

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        with self._lock:
            before = self._budget
            self._budget = None if budget is None else parse_budget(budget)
            try:
                self._check_room(0)
            except BudgetError:
                self._budget = before
                raise
            self._make_room()

    def statistics(self) -> Statistics:
        """Return what the chain did so far and holds now; layers that ran again count as replayed operators."""
        with self._lock:
            return self._ledger.snapshot(self._budget)

    # -- keeping and letting go -------------------------------------------------------------------------------------

    def _find(self, layer_id: Hashable) -> _Record:
        record = self._records.get(layer_id)
        if record is None:
            known = ", ".join(repr(one) for one in list(self._records)[-4:]) or "none"
            raise UnknownLayerError(
                f"the chain has no layer {layer_id!r}: it was not run forward, or was run backward or removed already; "
                f"the last ones that it has: {known}"
            )
        return record

    def _forget(self, record: _Record) -> None:
        del self._records[record.layer_id]
        record.standing = False
        self._set(record, State.ABSENT, None)
        self._ledger.made.leave(record.nbytes)
        for one in self._records.values():
            if one.before is record:
                one.before = None

    def _set(self, record: _Record, state: State, x: Any) -> None:
        self._ledger.move(record.nbytes, record.state, state)
        record.state = state
        record.x = x

    def _has_room(self, nbytes: int) -> bool:
        return self._budget is None or self._ledger.kept.bytes + nbytes <= self._budget

    def _make_room(self, coming: _Record | None = None) -> bool:
        """Let go of as many inputs as it takes, the least worthy first. False: that is the one for which it is made."""
        while not self._has_room(coming.nbytes if coming else 0):
            able = [one for one in self._kept() if _comes_back(one)]
            if coming is not None and coming.before is not None:
                able.append(coming)
            if not able:
                break  # what is left cannot be computed again
            worths = {one: self._worth(self._layer(one)) for one in able}
            least = min(able, key=lambda one: worths[one])
            if least is coming:
                return False
            self._set(least, State.EVICTED, None)
        return True

    def _kept(self) -> list[_Record]:
        return [one for one in self._records.values() if one.state is State.KEPT]

    def _layer(self, record: _Record) -> Layer:
        seconds, before = 0.0, record.before
        while before is not None:
            seconds += before.seconds
            before = None if before.state is State.KEPT else before.before
        return Layer(record.layer_id, record.index, record.nbytes, seconds)


def _comes_back(record: _Record) -> bool:
    """Tell whether the input could be computed from another that is kept."""
    before = record.before
    while before is not None and before.state is not State.KEPT:
        before = before.before
    return before is not None


def _time_per_byte(layer: Layer) -> float:
    return layer.cost / max(layer.nbytes, 1)


def _decider(policy: ChainPolicy | Callable[[Layer], Decision] | None) -> Callable[[Layer], Decision]:
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


def _reference(y: Any) -> Callable[[], Any]:
    """Return what tells whether an object is ``y``, without keeping it alive where that is possible."""
    try:
        return weakref.ref(y)
    except TypeError:
        return lambda: y
