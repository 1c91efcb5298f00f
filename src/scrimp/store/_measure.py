"""How fast a store is, found out by using it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from scrimp._streams import stream_of
from scrimp.store._lanes import unseen
from scrimp.store._store import Store

_NBYTES = {"cuda": 32 << 20, "cpu": 4 << 20}
_TIMES = 3


class Bandwidths(NamedTuple):
    """Bytes per second into a store and back; 0 where it has no room."""

    out: float
    back: float


def measured(store: Store, device: torch.device) -> Bandwidths:
    """Copy something to a store and back, a few times after a first time that is not counted.

    >>> import torch, scrimp
    >>> measured(scrimp.store.Host(), torch.device("cpu")).out > 0
    True
    """
    nbytes = _NBYTES.get(device.type, _NBYTES["cpu"])
    if store.limit is not None:
        nbytes = min(nbytes, store.limit // 2)
    with unseen():
        content = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device)
    if not _there_and_back(store, content):
        return Bandwidths(0.0, 0.0)
    before = store.statistics
    for _ in range(_TIMES):
        _there_and_back(store, content)
    after = store.statistics
    out = (after.bytes_out - before.bytes_out) / max(after.seconds_out - before.seconds_out, 1e-9)
    back = (after.bytes_in - before.bytes_in) / max(after.seconds_in - before.seconds_in, 1e-9)
    return Bandwidths(out, back)


def _there_and_back(store: Store, content: torch.Tensor) -> bool:
    with unseen():
        copy = store.put(content, scheduled=True)
        if copy is None:
            return False
        copy.wait_until_left(content, stream_of(content.device))
        copy.arrive()
        copy.on_device = False
        copy.fetch()
        copy.discard()
    return True
