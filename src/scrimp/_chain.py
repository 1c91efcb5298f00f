"""Layers with a hand-written backward: which inputs are kept, and how the others come back. No torch here."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

from scrimp._budget import Budget, format_bytes, parse_budget
from scrimp._chain_choice import chosen, described
from scrimp._chain_layer import (
    HERE,
    Backward,
    ChainCopy,
    ChainPolicy,
    ChainStore,
    Forward,
    Layer,
    Record,
    comes_back,
    decider,
    time_per_byte,
)
from scrimp._decision import KEEP, Decision
from scrimp._loops.schedule import sweep
from scrimp._statistics import Ledger, State, Statistics
from scrimp.errors import (
    BudgetError,
    ChainError,
    LayerOrderError,
    MissingInputError,
    StoreError,
    UnknownLayerError,
)

if TYPE_CHECKING:
    from scrimp.store import Store


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
        store: Where inputs go that the budget has no room for, as far as it takes them: a store of
            :mod:`scrimp.store`, for NumPy arrays and tensors in one piece, or any object with the methods of
            ``ChainStore``.

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
        self,
        policy: ChainPolicy | Callable[[Layer], Decision] | None = None,
        budget: Budget | None = None,
        store: ChainStore | Store | None = None,
    ) -> None:
        self._decide = decider(policy)
        self._worth: Callable[[Layer], float] = getattr(policy, "worth", time_per_byte)
        self._budget: int | None = getattr(policy, "budget", None)
        if budget is not None:
            self._budget = parse_budget(budget)
        self._store = None if store is None else _for_any_input(store)
        self._enabled = True
        self._turn = threading.RLock()  # held while a layer is computed; never waited for with the other one held
        self._lock = threading.RLock()  # guards what is below; never held while a function of the user's runs
        self._records: dict[Hashable, Record] = {}
        self._latest: tuple[Callable[[], Any], Record] | None = None
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
            ChainError: The input has no ``nbytes``, or the cost is less than nothing.
            LayerOrderError: The chain has a layer of this name.
            BudgetError: The budget has no room for an input that has to be kept.
        """
        with self._turn:
            record = self._new(layer_id, x, forward_fn, cost)
            start = time.perf_counter()
            y = forward_fn(x)
            record.seconds = time.perf_counter() - start if cost is None else cost
            with self._lock:
                self._add(record, x)
                self._latest = _reference(y), record
            return y

    def _new(self, layer_id: Hashable, x: Any, forward_fn: Forward, cost: float | None) -> Record:
        try:
            nbytes = operator.index(x.nbytes)
        except (AttributeError, TypeError):
            nbytes = -1
        if nbytes < 0:
            raise ChainError(
                f"layer {layer_id!r} needs an input with nbytes, such as a NumPy array or a memoryview; have "
                f"{type(x).__name__}. Wrap it in a class that has nbytes"
            )
        if cost is not None and not cost >= 0:
            raise ChainError(f"the cost of layer {layer_id!r} must be 0 seconds or more; have {cost!r}")
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
            if before is None and self._store is None:
                self._check_room(nbytes)
            return Record(layer_id, len(self._records), nbytes, before, forward_fn)

    def _check_room(self, nbytes: int) -> None:
        """Raise if an input that cannot be computed again has no room beside the others of that kind."""
        needed = nbytes + sum(one.nbytes for one in self._kept() if not comes_back(one))
        if self._budget is not None and needed > self._budget:
            raise BudgetError(
                f"inputs that cannot be computed again have {format_bytes(needed)} together, the budget is "
                f"{format_bytes(self._budget)}; raise it to that at least",
                smallest=needed,
            )

    def _add(self, record: Record, x: Any) -> None:
        if record.before is not None and not record.before.standing:
            record.before = None  # removed by another thread meanwhile
        wanted = record.before is None or not self._enabled or self._decide(described(record)) is KEEP
        fits = wanted and self._make_room(record)
        copy = self._store.put(x) if self._store is not None and wanted and not fits else None
        if record.before is None and not fits and copy is None:
            self._check_room(record.nbytes)
        self._records[record.layer_id] = record
        self._ledger.made.enter(record.nbytes)
        if fits:
            self._set(record, State.KEPT, x)
        elif copy is not None:
            self._set(record, State.STORED, None, copy)
        else:
            self._set(record, State.EVICTED if wanted else State.DROPPED)

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

    def _input_of(self, record: Record) -> Any:
        """Return the layer's input, computing it from the nearest one that is kept."""
        with self._lock:
            path = self._path(record)
            retain = self._worth_retaining(path)
            x, copy = path[0].x, path[0].copy
        if copy is not None:
            try:
                x = copy.fetch()
            except StoreError:
                with self._lock:
                    if path[0].copy is copy:
                        if not comes_back(path[0]):
                            raise
                        self._set(path[0], State.EVICTED)
                return self._input_of(record)
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
    def _path(record: Record) -> list[Record]:
        """Return the layers from the nearest kept input down to ``record``."""
        path = [record]
        while path[-1].state not in HERE:
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

    def _worth_retaining(self, path: list[Record]) -> set[Record]:
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
        """Whether the input of this layer is kept or stored, so that its backward need compute nothing again."""
        with self._lock:
            return layer_id in self._records and self._records[layer_id].state in HERE

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
                if self._store is None:
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

    def _find(self, layer_id: Hashable) -> Record:
        record = self._records.get(layer_id)
        if record is None:
            known = ", ".join(repr(one) for one in list(self._records)[-4:]) or "none"
            raise UnknownLayerError(
                f"the chain has no layer {layer_id!r}: it was not run forward, or was run backward or removed already; "
                f"the last ones that it has: {known}"
            )
        return record

    def _forget(self, record: Record) -> None:
        is_last = next(reversed(self._records.values())) is record
        del self._records[record.layer_id]
        record.standing = False
        self._set(record, State.ABSENT)
        self._ledger.made.leave(record.nbytes)
        if is_last:
            return  # nothing follows from it
        for one in self._records.values():
            if one.before is record:
                one.before = None

    def _set(self, record: Record, state: State, x: Any = None, copy: ChainCopy | None = None) -> None:
        if record.copy is not None:
            record.copy.discard()
        self._ledger.move(record.nbytes, record.state, state)
        record.state, record.x, record.copy = state, x, copy

    def _has_room(self, nbytes: int) -> bool:
        return self._budget is None or self._ledger.kept.bytes + nbytes <= self._budget

    def _make_room(self, coming: Record | None = None) -> bool:
        """Let go of as many inputs as it takes, the least worthy first. False: that is the one for which it is made."""
        refused: set[Record] = set()
        while not self._has_room(coming.nbytes if coming else 0):
            assert self._budget is not None
            over = self._ledger.kept.bytes + (coming.nbytes if coming else 0) - self._budget
            able = [one for one in self._kept() if one not in refused]
            going = chosen(able, coming, over, self._worth, self._store is not None)
            if coming in going:
                return False
            if not going:
                break  # what is left cannot be computed again
            for one in going:
                copy = self._store.put(one.x) if self._store is not None else None
                if copy is not None:
                    self._set(one, State.STORED, None, copy)
                elif comes_back(one):
                    self._set(one, State.EVICTED)
                else:
                    refused.add(one)
        return self._has_room(coming.nbytes if coming else 0)

    def _kept(self) -> list[Record]:
        return [one for one in self._records.values() if one.state is State.KEPT]


def _for_any_input(store: ChainStore | Store) -> ChainStore:
    if not callable(getattr(store, "put", None)):
        raise ChainError(f"store= needs a store, such as scrimp.store.Host(), or an object with put(); have {store!r}")
    from scrimp._chain_store import arrays_in  # imports torch, which chains without a store do without

    return arrays_in(store)


def _reference(y: Any) -> Callable[[], Any]:
    """Return what tells whether an object is ``y``, without keeping it alive where that is possible."""
    try:
        return weakref.ref(y)
    except TypeError:
        return lambda: y
