"""What every store has in common: an order, in which values come back last first, and bytes on their way."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from scrimp._budget import parse_budget
from scrimp.store._account import Account, StoreStatistics
from scrimp.store._lanes import Landing, leave_lying, take
from scrimp.store._turn import Turn


class Copy(abc.ABC):
    """The bytes of one value in a store.

    Attributes:
        nbytes: how many they are.
        device: where they came from, and go back to.
        at_once: whether all was copied when :meth:`Store.put` returned.
        on_device: whether the value is there still, or there again, so that nothing has to be fetched.
        scheduled: whether a plan says when they come back, so that nobody else fetches them ahead.
    """

    __slots__ = (
        "__weakref__", "at_once", "device", "landing", "nbytes", "older", "on_device", "scheduled", "store", "taken",
        "younger",
    )  # fmt: skip

    def __init__(self, store: Store, nbytes: int, taken: int, device: torch.device) -> None:
        self.store = store
        self.nbytes = nbytes
        self.taken = taken
        """Bytes of the store that it takes."""
        self.device = device
        self.at_once = False
        self.on_device = True
        self.scheduled = False
        self.landing: Landing | None = None
        """The way back, once begun, until somebody takes what lands."""
        self.older: Copy | None = None
        self.younger: Copy | None = None

    @abc.abstractmethod
    def wait_until_left(self, content: Tensor, owner: int) -> None:
        """Wait until what was given to the store may change or go: on CUDA the current stream does, else the host.

        Args:
            content: Any tensor over what was given.
            owner: The number of the stream that its memory belongs to.
        """

    @abc.abstractmethod
    def come(self) -> Landing:
        """Begin the way back to the device."""

    @abc.abstractmethod
    def approach(self) -> None:
        """Begin as much of the way back as holds nobody up; it fails without a word."""

    @abc.abstractmethod
    def arrive(self) -> None:
        """Wait until the bytes are where the store keeps them."""

    def set_out(self) -> None:
        """Begin the way back because a plan says so, and hold nobody up until the bytes are needed."""
        self.store._landing_of(self)

    @abc.abstractmethod
    def forget(self) -> None:
        """Give back what it takes of the store."""

    # -- for sessions -----------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin the way back to the device, to be there when it is needed."""
        self.store._prefetch(self)

    def fetch(self) -> Tensor:
        """Return the bytes, on the device.

        Raises:
            StoreError: when they are lost.
        """
        return self.store._fetch(self)

    def discard(self) -> None:
        """Forget the bytes: nobody needs them any more. May be called from a destructor."""
        self.store._discard(self)


class Store(abc.ABC):
    """A place for bytes that are not needed for a while. Any number of sessions and threads may share one.

    Args:
        limit: Bytes that it holds at most, such as ``"32GiB"``; what does not fit goes the way that the policy says.
        window: Bytes that may be on their way in each direction. So much memory of the device is still taken by values
            that are leaving, and so much again by values that come back ahead of time; one value always may.
    """

    def __init__(self, limit: int | str | None, window: int | str) -> None:
        self.limit = None if limit is None else parse_budget(limit)
        self.window = parse_budget(window)
        self._account = Account()
        self._turn = Turn(self._settle)
        self._unneeded: deque[Copy] = deque()
        self._youngest: Copy | None = None
        self._ahead: dict[Copy, None] = {}

    @property
    def statistics(self) -> StoreStatistics:
        """What the store did so far and holds now."""
        with self._turn:
            return self._account.snapshot()

    @abc.abstractmethod
    def _take(self, content: Tensor) -> Copy | None:
        """Begin to copy bytes into the store; None where there is no room for them."""

    # -- for sessions -----------------------------------------------------------------------------------------------

    def put(self, content: Tensor, scheduled: bool = False) -> Copy | None:
        """Begin to copy bytes into the store.

        Args:
            content: One-dimensional, of ``torch.uint8``. It must not change before :meth:`Copy.wait_until_left`.
            scheduled: Whether a plan says when they come back.

        Returns:
            The copy; None where there is no room for it.
        """
        with self._turn:
            self._settle()
            copy = self._take(content)
            if copy is not None:
                self._add(copy, scheduled)
            return copy

    def _add(self, copy: Copy, scheduled: bool) -> None:
        copy.scheduled = scheduled
        copy.older = self._youngest
        if self._youngest is not None:
            self._youngest.younger = copy
        self._youngest = copy
        self._account.held.enter(copy.taken)
        self._account.bytes_out += copy.nbytes

    def prefetch_youngest(self) -> None:
        """Begin to fetch what was stored last, since backward begins."""
        with self._turn:
            self._look_ahead(self._youngest)

    def stay_ahead_no_longer(self) -> None:
        """Let go of what was fetched ahead and not asked for: a backward pass is over that did not need it."""
        with self._turn:
            for copy in list(self._ahead):
                self._let_lie(copy)

    # -- for copies -------------------------------------------------------------------------------------------------

    def _fetch(self, copy: Copy) -> Tensor:
        with self._turn:
            landing = self._landing_of(copy)
            copy.landing = None
            self._ahead.pop(copy, None)
            self._account.waited.add(take(landing))
            if not copy.scheduled:
                self._look_ahead(copy.older)
            return landing.tensor

    def _prefetch(self, copy: Copy) -> None:
        with self._turn:
            if not copy.on_device:
                copy.set_out()

    def _landing_of(self, copy: Copy) -> Landing:
        if copy.landing is None:
            copy.landing = copy.come()
            self._ahead[copy] = None
            self._account.bytes_in += copy.nbytes
            self._account.back.add(copy.landing.span)
        return copy.landing

    def _look_ahead(self, first: Copy | None) -> None:
        """Begin to fetch what comes next in backward, as far as the window reaches."""
        room = self.window
        for copy in _from(first):
            if copy.scheduled or copy.on_device:
                continue
            if room < copy.nbytes and room != self.window:
                return
            room -= copy.nbytes
            copy.approach()

    def _let_lie(self, copy: Copy) -> None:
        self._ahead.pop(copy, None)
        if copy.landing is not None:
            leave_lying(copy.landing)
            copy.landing = None

    def _hand_over(self, copy: Copy) -> Landing:
        """Return the way back of a copy, begun if it was not, for another store to take what lands."""
        with self._turn:
            landing = self._landing_of(copy)
            copy.landing = None
            self._ahead.pop(copy, None)
            return landing

    def _discard(self, copy: Copy) -> None:
        self._unneeded.append(copy)
        self._turn.soon()

    def _settle(self) -> None:
        while self._unneeded:
            copy = self._unneeded.popleft()
            self._let_lie(copy)
            if copy.younger is not None:
                copy.younger.older = copy.older
            if copy.older is not None:
                copy.older.younger = copy.younger
            if self._youngest is copy:
                self._youngest = copy.older
            copy.older = copy.younger = None
            self._account.held.leave(copy.taken)
            copy.forget()


def _from(copy: Copy | None) -> Iterator[Copy]:
    while copy is not None:
        yield copy
        copy = copy.older
