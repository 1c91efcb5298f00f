"""Stores of :mod:`scrimp.store` for the inputs of hand-written layers: NumPy arrays, and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scrimp._streams import stream_of
from scrimp.store import Copy, Store

if TYPE_CHECKING:
    from scrimp._chain_layer import ChainCopy, ChainStore


@final
@dataclass(frozen=True, slots=True)
class _Array:
    copy: Copy
    dtype: Any
    shape: tuple[int, ...]
    transposed: bool

    def fetch(self) -> NDArray[Any]:
        array: NDArray[Any] = self.copy.fetch().numpy().view(self.dtype).reshape(self.shape)
        return array.T if self.transposed else array

    def discard(self) -> None:
        self.copy.discard()


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    copy: Copy
    dtype: torch.dtype
    shape: torch.Size

    def fetch(self) -> Tensor:
        return self.copy.fetch().view(self.dtype).view(self.shape)

    def discard(self) -> None:
        self.copy.discard()


@final
class _Arrays:
    """Takes what is one piece of memory, so that it comes back in the same layout."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, x: Any) -> ChainCopy | None:
        """Take an array or a tensor."""
        if type(x) is np.ndarray and x.nbytes and not x.dtype.hasobject:
            transposed = not x.flags.c_contiguous
            whole = x.T if transposed else x
            if not whole.flags.c_contiguous:
                return None
            content = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
            copy = self._put(content)
            return None if copy is None else _Array(copy, x.dtype, whole.shape, transposed)
        if type(x) is Tensor and x.numel() and x.is_contiguous() and not x.requires_grad and not x.is_conj():
            copy = self._put(x.view(-1).view(torch.uint8))
            return None if copy is None else _Tensor(copy, x.dtype, x.shape)
        return None

    def _put(self, content: Tensor) -> Copy | None:
        copy = self._store.put(content)
        if copy is not None:
            copy.wait_until_left(content, stream_of(content.device))
        return copy


def arrays_in(store: ChainStore | Store) -> ChainStore:
    """Return a store that takes what layers are given."""
    return _Arrays(store) if isinstance(store, Store) else store
