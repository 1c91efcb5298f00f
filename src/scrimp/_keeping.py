"""What a session does that keeps everything: only count, and watch versions as autograd would.

No operator has to be recorded for that, so it costs a fraction of a session that may drop.
"""

from __future__ import annotations

import threading

from torch import Tensor

from scrimp._compiler import never_compiled
from scrimp._geometry import is_plain
from scrimp._statistics import Ledger, State
from scrimp.errors import SavedChangedError, saved_changed


class _Storage:
    """A storage that autograd saved something of."""

    __slots__ = ("address", "handles", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.handles = 0


class KeptHandle:
    """Stands for a tensor in autograd's graph, and holds it."""

    __slots__ = ("hooks", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int, storage: _Storage | None, hooks: KeepingHooks) -> None:
        self.tensor = tensor
        self.version = version
        self.storage = storage
        self.hooks = hooks

    @never_compiled
    def __del__(self) -> None:
        if self.storage is not None:
            self.hooks.forget(self.storage)


class KeepingHooks:
    """The pair of saved-tensor hooks of a session that keeps everything."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()
        self._storages: dict[int, _Storage] = {}

    @never_compiled
    def pack(self, tensor: Tensor) -> KeptHandle:
        """Keep a tensor that autograd saves."""
        base = tensor if tensor._base is None else tensor._base
        # Without a record, parameters are all that can be told from what the forward pass made.
        storage = None if (base.is_leaf and base.requires_grad) or not is_plain(tensor) else self._count(tensor)
        return KeptHandle(tensor.detach(), tensor._version, storage, self)

    def _count(self, tensor: Tensor) -> _Storage:
        memory = tensor.untyped_storage()
        address = memory._cdata
        with self._lock:
            storage = self._storages.get(address)
            if storage is None:
                storage = self._storages[address] = _Storage(address, memory.nbytes())
                self._ledger.made.enter(storage.nbytes)
                self._ledger.move(storage.nbytes, State.ABSENT, State.KEPT)
            storage.handles += 1
        return storage

    def forget(self, storage: _Storage) -> None:
        """Take note that a handle died. Its tensor, which is still held, keeps the address from being used again."""
        with self._lock:
            storage.handles -= 1
            if not storage.handles:
                del self._storages[storage.address]
                self._ledger.made.leave(storage.nbytes)
                self._ledger.move(storage.nbytes, State.KEPT, State.ABSENT)

    @never_compiled
    def unpack(self, handle: KeptHandle) -> Tensor:
        """Give autograd the tensor again, if it is still what was saved."""
        if handle.tensor._version != handle.version:
            raise SavedChangedError(saved_changed(f"a tensor of shape {list(handle.tensor.shape)}"))
        return handle.tensor
