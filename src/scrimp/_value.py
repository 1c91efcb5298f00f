"""Values, the calls that make them, and who needs them.

A :class:`Value` is the content of one storage at one version. It is *held* (``tensor`` is set) or not; a value that is
not held can be had back by repeating its ``call``. Memory follows *demand*, a count of

* handles: places in autograd's graph where the value is saved, and
* dropped values whose replay reads this one.

What nobody demands holds nothing. A value that is demanded but not held is *secured*: it demands its call's inputs in
turn, down to values that are held. So a dropped value keeps exactly what its replay starts from, and all of it goes
when the last handle does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scrimp._environment import Environment
from scrimp._geometry import Geometry, geometry_of, look
from scrimp._operators import Operator
from scrimp._rng import Draw
from scrimp._statistics import State
from scrimp._streams import Ready

if TYPE_CHECKING:
    from scrimp._scope import Scope
    from scrimp.store import Copy, Store


class Timing(NamedTuple):
    """When a value that a plan stores leaves the device, and when it comes back."""

    free_at: int
    """The operator, counted from 0, after which the device has its memory back."""
    fetch_at: tuple[int, int] | None
    """The place (operator and result) of the value at whose unpacking the way back begins; None: at its own."""
    turn: int
    """Which unpacking of it in a backward pass, counted from 1."""


class Ref(NamedTuple):
    """A tensor argument of a recorded call that looks at a value in another way than it was made."""

    value: Value
    geometry: Geometry


class Blank(NamedTuple):
    """A tensor argument that the call overwrites without reading: any memory of this geometry will do."""

    geometry: Geometry
    device: torch.device


class Shown(NamedTuple):
    """A tensor, one that shares its version counter, and what that counted."""

    tensor: Tensor
    witness: Tensor
    version: int


class Call:
    """An operator as it was called, with its tensors replaced by values, :class:`Ref` and :class:`Blank`."""

    __slots__ = (
        "args", "draw", "environment", "inputs", "kwargs", "operator", "outputs", "seconds", "sequence", "written",
    )  # fmt: skip

    def __init__(
        self,
        operator: Operator,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: tuple[Value, ...],
        written: tuple[Value, ...],
        draw: Draw | None,
        environment: Environment,
        sequence: int,
    ) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        """The values it reads, each once."""
        self.written = written
        """Those of them that it writes, and so must be given as private copies in a replay."""
        self.draw = draw
        self.environment = environment
        self.sequence = sequence
        """Which operator of the recording it was, counted from 1."""
        self.outputs: list[weakref.ref[Value]] = []
        self.seconds: float | None = None
        """An estimate of its time, once somebody has asked for it."""

    @property
    def name(self) -> str:
        """The operator's name, for people."""
        return self.operator.name


def _gone() -> None:
    return None


class Value:
    """The content of one storage at one version; see the module's docstring.

    One is made for every result of every operator, so what seldom differs from its default lives in the class.
    """

    external = False
    """It was there before the session: it costs nothing, since the session could not free it."""
    owner: Callable[[], Tensor | None] = staticmethod(_gone)
    """Of a view of a leaf, such as a transposed weight: the leaf."""
    rooted = False
    """It stays held while the session is open, demanded or not, since nobody could bring it back."""
    tensor: Tensor | None = None
    """The content, where it is held."""
    witness: Tensor | None = None
    """Shares the version counter of what ``tensor`` holds."""
    stream = 0
    ready: Ready | None = None
    demand = 0
    handles = 0
    secured = False
    overwritten = False
    """Its storage holds another value by now."""
    replayed = False
    """What is held was brought back by a replay, and can be again."""
    stale = False
    """What is held has been overwritten since. Autograd's handles still want it: they check the version of the part
    that they saved, which may be a view that counts on its own. A replay must not start from it."""
    proof: Tensor | None = None
    """A copy of its bytes, to compare a replay with (``verify=True``)."""
    boundary = False
    """One region made it and another reads it: where the replay of a region starts."""
    decided = False
    number = -1
    """How many values of its session were decided before it."""
    passes = 0
    """How many replays may still compute it without retaining it."""
    passing = False
    """It was brought back for one use: it is let go again when the next of its handles dies."""
    pinned = False
    """The policy decided to keep it: it is held whenever it is demanded."""
    store: Store | None = None
    """Where the policy wants its bytes, instead of on the device."""
    copy: Copy | None = None
    """Its bytes there. It is made once, and stays until nobody demands the value."""
    timing: Timing | None = None
    """When a plan wants it gone and back."""
    made_at = 0
    """The sequence number of the operator that made it, where ``call`` does not say."""
    state = State.ABSENT
    storage: weakref.ref[torch.UntypedStorage] | None = None
    shown: Shown | None = None
    """What autograd's handles stand for, where the storage was overwritten and ``tensor`` is a copy for replays."""

    def __init__(
        self, tensor: Tensor, geometry: Geometry, nbytes: int, scope: Scope, call: Call | None, index: int
    ) -> None:
        self.call = call
        self.index = index
        """Which of the call's results it is."""
        self.geometry = geometry
        """How the tensor that the call returned looks at the storage."""
        self.nbytes = nbytes
        self.device = tensor.device
        self.scope = scope
        self.version = self.at_birth = self.seen = tensor._version
        """``version``: of the tensor that it is held through, when that showed this value.
        ``at_birth``: of the tensor that it was born as.
        ``seen``: the highest of any tensor that was seen to look at the storage; some views count on their own."""
        self.born: Callable[[], Tensor | None] = weakref.ref(tensor)

    def written(self, counted: bool) -> None:
        """Take note that it was made by a write, which autograd counts only after the operator has returned to it."""
        if counted:
            self.version += 1
            self.at_birth += 1
        self.seen = max(self.seen, self.at_birth)

    def is_what_was_made(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the one that it was born as, and still looks at the storage in the same way.

        Assigning to ``tensor.data`` gives a tensor object another geometry, and moves no version counter.
        """
        if self.born() is not tensor:
            return False
        dtype, size, stride, offset, conj, _ = self.geometry
        return (
            tensor.stride() == stride
            and tensor.shape == size
            and tensor.storage_offset() == offset
            and tensor.dtype is dtype
            and (not dtype.is_complex or tensor.is_conj() is conj)
        )

    def reshaped_through(self, tensor: Tensor) -> None:
        """Take note that a tensor object is about to look in another way at the storage, which counts as a write."""
        self.born = _gone
        version = tensor._version
        self.seen = max(self.seen, version + 1)
        if self.witness is not None and self.witness._version == version == self.version:
            self.version += 1

    def hold(self, tensor: Tensor, witness: Tensor) -> None:
        """Keep the content alive; ``witness`` shares the version counter of those who might change it."""
        self.tensor = tensor
        self.witness = witness
        self.version = witness._version
        self.stale = False
        if self.copy is not None:
            self.copy.on_device = True
        elif self.store is not None:
            self.scope.outbox.add(self)
        self.settle()

    def hold_through(self, tensor: Tensor) -> None:
        """Keep the content alive through any tensor that looks at its storage."""
        witness = share(tensor)
        if self.is_what_was_made(tensor) or geometry_of(tensor) == self.geometry:
            self.hold(witness, witness)
        else:
            with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():
                self.hold(look(witness, self.geometry), witness)

    def let_go(self, evicted: bool = False) -> None:
        """Stop keeping the content alive; a copy elsewhere is forgotten if nobody needs that either."""
        self.tensor = self.witness = self.ready = self.shown = None
        self.replayed = self.passing = False
        if self.copy is not None:
            self.copy.on_device = False
            if not self.demand and not self.rooted:
                self.copy.discard()
                self.copy = None
        self.settle(evicted)

    def settle(self, evicted: bool = False) -> None:
        """Bring the scope's account up to date with what is held now."""
        before = self.state
        if self.tensor is None and self.copy is not None:
            after = State.STORED
        elif self.external:
            after = State.ABSENT
        elif self.tensor is not None:
            after = State.KEPT
        elif not self.handles:
            after = State.ABSENT
        elif evicted or before is State.EVICTED:
            after = State.EVICTED
        else:
            after = State.DROPPED
        if after is not before:
            self.state = after
            self.scope.ledger.move(self.nbytes, before, after)

    def move_to(self, scope: Scope) -> None:
        """Have another scope answer for it from now on."""
        if scope is self.scope:
            return
        if not self.external:
            self.scope.ledger.move(self.nbytes, self.state, State.ABSENT)
            scope.ledger.move(self.nbytes, State.ABSENT, self.state)
            if self.handles:
                self.scope.ledger.made.leave(self.nbytes)
                scope.ledger.made.enter(self.nbytes)
        self.scope = scope

    @property
    def place(self) -> tuple[int, int]:
        """Which operator of its recording made it, counted from 0, and which of that operator's results it is."""
        return (self.made_at if self.call is None else self.call.sequence) - 1, self.index

    @property
    def at_hand(self) -> bool:
        """Whether a replay can start from it."""
        return (self.tensor is not None and not self.stale) or self.copy is not None

    @property
    def is_away(self) -> bool:
        """Whether it is in a store and not on the device."""
        return self.tensor is None and self.copy is not None

    def unchanged(self) -> bool:
        """Tell whether what is held is still what the call made."""
        assert self.tensor is not None
        assert self.witness is not None
        return self.witness._version == self.version and self.tensor.untyped_storage().nbytes() == self.nbytes

    def __repr__(self) -> str:
        made_by = f"made by {self.call.name}" if self.call else "not made by a recorded operator"
        return f"{str(self.geometry.dtype).removeprefix('torch.')}{list(self.geometry.size)} {made_by}"


def secure(value: Value) -> bool:
    """Demand what a replay of ``value`` starts from. False, with nothing changed, where that cannot be had any more."""
    assert value.call is not None
    inputs = value.call.inputs
    for source in inputs:
        held = source.tensor is not None and not source.stale
        if not (held or source.secured or source.at_hand):
            break
    else:  # so it is nearly always
        for source in inputs:
            source.demand += 1
        value.secured = True
        return True
    demanded: list[Value] = []
    secured = [value]
    pending = [value]
    value.secured = True
    while pending:
        call = pending.pop().call
        assert call is not None
        for source in call.inputs:
            source.demand += 1
            demanded.append(source)
            if source.secured or source.at_hand:
                continue
            if (source.call is None or source.pinned) and _hold_what_lives(source):
                continue
            if source.call is None:
                for done in secured:
                    done.secured = False
                for one in demanded:
                    _undemand(one)
                return False
            source.secured = True
            secured.append(source)
            pending.append(source)
    return True


def _undemand(value: Value) -> None:
    # Only for the way back out of `secure`: whatever it had secured is in its list, so nothing has to be followed.
    value.demand -= 1
    if value.demand == 0 and not value.rooted and (value.tensor is not None or value.copy is not None):
        value.let_go()


def _hold_what_lives(value: Value) -> bool:
    """Hold a value through the tensor that it was born as, or its owner, if that is alive and was not written."""
    owner = value.owner()
    if owner is not None and _is_still(owner, value):
        value.hold_through(owner)
        return True
    tensor = value.born()
    if tensor is None or not _is_still(tensor, value) or not value.is_what_was_made(tensor):
        return False
    value.hold_through(tensor)
    return True


def _is_still(tensor: Tensor, value: Value) -> bool:
    """Tell whether a tensor has the memory that a value was born in, as it was then."""
    storage = value.storage() if value.storage is not None else None
    # Otherwise the tensor object has been given other memory since, by assigning to its ``data``.
    same = storage is not None and tensor.untyped_storage()._cdata == storage._cdata
    return same and not value.overwritten and tensor._version == value.at_birth


_VIEW_TRACKING = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_detach_unseen = Tensor._make_subclass  # a guard around `detach` takes as long again


def share(tensor: Tensor) -> Tensor:
    """Return another tensor over the same storage and version counter, with no tie to autograd's graph."""
    if not _is_excluded(_VIEW_TRACKING):
        return _detach_unseen(Tensor, tensor)
    # Inside a dispatch mode the key that makes a view share its base's version counter is switched off.
    tracking = torch._C._dispatch_tls_local_exclude_set().remove(_VIEW_TRACKING)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), tracking),
        torch._C._DisableTorchDispatch(),
    ):
        return tensor.detach()


def release(value: Value) -> None:
    """Take back one demand; what nobody demands any more lets go of its bytes and of what it demanded itself."""
    pending = [value]
    while pending:
        one = pending.pop()
        one.demand -= 1
        if one.demand:
            continue
        if not one.rooted and (one.tensor is not None or one.copy is not None):
            one.let_go()
        if one.secured:
            one.secured = False
            assert one.call is not None
            pending.extend(one.call.inputs)
