"""Where the values of a limited step may wait: stores, their bytes and their speed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cached_property
from typing import final

import torch

from scrimp._budget import Budget, parse_budget
from scrimp._plan import Plan
from scrimp._solve import plan as solve
from scrimp._solve._planner import CLOSE
from scrimp._trace import Trace
from scrimp.errors import BudgetError, SessionError
from scrimp.store import Disk, Host, Store, Tiers
from scrimp.store._measure import Bandwidths, measured

_ENDLESS = 1 << 50  # bytes: what a store without a limit holds
_COUNTED_ON = 0.9  # of a measured bandwidth: a plan that fills the link to the last byte waits for all that goes wrong


@final
class Elsewhere:
    """The stores of a session with a budget; none, host memory, a disk, or both.

    Args:
        host: A store, or bytes of one.
        disk: A store, or bytes of one in the system's folder for temporary files.
        device: The one that the budget is for.
    """

    def __init__(self, host: Host | Budget | None, disk: Disk | Budget | None, device: torch.device) -> None:
        self._device = device
        self._host = Host(_bytes(host, "host")) if isinstance(host, (int, float, str)) else host
        if isinstance(disk, (int, float, str)):
            disk = Disk(tempfile.gettempdir(), _bytes(disk, "disk"))
        self._disk = disk
        for store, kind, name in ((self._host, Host, "host"), (self._disk, Disk, "disk")):
            if store is not None and not isinstance(store, kind):
                raise SessionError(
                    f'need {name}= as bytes, such as "32GiB", or as a scrimp.store.{kind.__name__}; have {store!r}'
                )
        self.store = self._together()

    def on(self, device: torch.device) -> Elsewhere:
        """Return the same stores for another device."""
        return Elsewhere(self._host, self._disk, device)

    def _together(self) -> Store | None:
        if self._host is None or self._disk is None:
            return self._host or self._disk
        if self._host.limit is None:
            raise SessionError('need a limit of bytes for host= when there is a disk= as well: host="32GiB"')
        return Tiers(self._host, self._disk)

    @cached_property
    def speed(self) -> Bandwidths:
        """Of what is stored first."""
        store = self._host or self._disk
        assert store is not None
        return _counted_on(measured(store, self._device))

    @cached_property
    def _slowest(self) -> Bandwidths:
        assert self._disk is not None
        disk = _counted_on(measured(self._disk, self._device))
        return Bandwidths(min(disk.out, self.speed.out), min(disk.back, self.speed.back))

    def get_ready(self) -> None:
        """Find out how fast it is, while the device has room for that."""
        if self.store is not None:
            _ = self.speed

    def solve(self, trace: Trace, budget: int) -> tuple[Trace, Plan]:
        """The fastest plan found: with the first store alone at its speed, or with all at the speed of the slowest.

        Returns:
            The trace, with these bandwidths, and the plan.

        Raises:
            BudgetError: when none fits.
        """
        if self.store is None:
            return trace, solve(trace, budget)
        host, disk = (None if one is None else one.limit or _ENDLESS for one in (self._host, self._disk))
        ways: list[tuple[Bandwidths, int | None, int | None]] = [] if host is None else [(self.speed, host, None)]
        if disk is not None:
            ways.append((self._slowest, host, disk))
        found: list[tuple[Trace, Plan]] = []
        failed: BudgetError | None = None
        for speed, near, far in ways:
            if found and found[0][1].seconds <= found[0][1].plain_seconds * (1 + CLOSE):
                break
            linked = replace(trace, out_bandwidth=speed.out, in_bandwidth=speed.back)
            try:
                if speed.out and speed.back:
                    found.append((linked, solve(linked, budget, host=near, disk=far)))
                else:
                    found.append((trace, solve(trace, budget)))
            except BudgetError as error:
                failed = error
        if not found:
            assert failed is not None
            raise failed
        return min(found, key=lambda one: one[1].seconds)


def _counted_on(speed: Bandwidths) -> Bandwidths:
    return Bandwidths(speed.out * _COUNTED_ON, speed.back * _COUNTED_ON)


def _bytes(stated: Budget, name: str) -> int:
    if isinstance(stated, float):
        raise BudgetError(f'need {name}= in bytes, such as "32GiB"; have {stated!r}, a fraction of nobody knows what')
    return parse_budget(stated)
