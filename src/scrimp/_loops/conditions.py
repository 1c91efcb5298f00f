"""The conditions under which steps run: the same when they are run again as they were the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch.autograd.graph import saved_tensors_hooks

from scrimp import _environment
from scrimp._keeping import KeepingHooks
from scrimp._session import apart
from scrimp._statistics import Ledger


@final
@dataclass(frozen=True, slots=True)
class _Autocast:
    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device: str) -> _Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def put(self) -> None:
        torch.set_autocast_enabled(self.device, self.enabled)
        torch.set_autocast_dtype(self.device, self.dtype)


@final
@dataclass(frozen=True, slots=True)
class Conditions:
    """What was in force around the loop."""

    environment: _environment.Environment
    autocast: tuple[_Autocast, ...]

    @classmethod
    def now(cls) -> Conditions:
        """Return what is in force."""
        devices = ("cpu", *(name for name in ("cuda", "xpu", "mps") if getattr(torch, name).is_available()))
        return cls(_environment.current(), tuple(_Autocast.of(device) for device in devices))

    @contextmanager
    def in_force(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Put them in force for the block; what it gets makes a context in which those from before are.

        Nobody outside sees what runs in it: no session records it, and no hooks get its saved tensors. Autocast does
        not remember weights that it has cast, since what it remembers outlives the step in which it was computed.
        """
        before = Conditions.now()
        caching = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            stack.enter_context(apart())
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                hooks = KeepingHooks(Ledger())
                stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
            stack.enter_context(_environment.restored(self.environment))
            try:
                torch.set_autocast_cache_enabled(False)
                for one in self.autocast:
                    one.put()
                stack.enter_context(torch.enable_grad())
                yield nullcontext if before == self else lambda: _switched(self, before, caching)
            finally:
                for one in before.autocast:
                    one.put()
                torch.set_autocast_cache_enabled(caching)


@contextmanager
def _switched(inside: Conditions, outside: Conditions, caching: bool) -> Iterator[None]:
    try:
        for one in outside.autocast:
            one.put()
        torch.set_autocast_cache_enabled(caching)
        with _environment.restored(outside.environment):
            yield
    finally:
        for one in inside.autocast:
            one.put()
        torch.set_autocast_cache_enabled(False)
