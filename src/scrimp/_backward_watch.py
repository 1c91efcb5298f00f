"""What backward takes of its own: seconds, and bytes of the storages that its nodes make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch._ops import OpOverload

from scrimp._draft import Draft, DraftRun
from scrimp._geometry import is_plain
from scrimp._limiter import Limiter
from scrimp._live import LiveStorages
from scrimp._record import tensors_in


@final
class BackwardWatch:
    """Sees the operators of backward, and sums them up node by node."""

    def __init__(self, limiter: Limiter, draft: Draft) -> None:
        self._limiter = limiter
        self._meter = limiter.meter
        self._draft = draft
        self._own = LiveStorages(self._meter.block)
        self._level = 0
        self._transient = 0
        self._node: Any = None
        self._module = ""
        self._marks: list[tuple[Any, Any]] = []

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of backward."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self.close("")
            self._node = node
        meter = self._meter
        older = {t.untyped_storage()._cdata for t in tensors_in([*args, *kwargs.values()]) if is_plain(t)}
        result, cost = self._limiter.timed(func, args, kwargs)
        for tensor in tensors_in(result):
            if is_plain(tensor) and tensor.device == meter.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in older:
                    meter.made(storage)
                    self._own.add(storage)
        self._marks.append((cost.start, cost.end))
        self._transient = max(self._transient, self._own.now + cost.transient)
        return result

    def between(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that the program calls between two backward passes over one graph."""
        self._limiter.make_room_for(func, args, kwargs)
        return self.replay(func, args, kwargs)

    def replay(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of a replay."""
        result = self._limiter.retried(func, args, kwargs)
        older = {t.untyped_storage()._cdata for t in tensors_in([*args, *kwargs.values()]) if is_plain(t)}
        for tensor in tensors_in(result):
            if is_plain(tensor) and tensor.device == self._meter.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in older:
                    self._meter.made(storage)
        return result

    @property
    def own_bytes(self) -> int:
        """Bytes that are alive of what backward made."""
        return self._own.now

    def abandon(self) -> None:
        """Let go of the node that runs: its graph has handles, which hold this, and nobody would see the cycle."""
        self._node = None
        self._marks.clear()

    def close(self, next_module: str) -> None:
        """Write down what happened since the last event."""
        net = self._own.now - self._level
        peak = max(self._own.peak, self._transient) - self._level
        if self._node is not None or net or peak:
            name = type(self._node).__name__ if self._node is not None else "autograd"
            self._draft.events.append(DraftRun(name, self._module, tuple(self._marks), max(peak, net, 0), net))
        self._module = next_module or self._module
        self._node = None
        self._marks.clear()
        self._level = self._own.peak = self._own.now
        self._transient = 0
