"""How a tensor looks at its storage.

Values are identified by storage, so a view is nothing but a geometry: it costs no bytes and is never replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_tuple_new = tuple.__new__


class Geometry(NamedTuple):
    """Everything that makes a strided tensor out of a storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    conj: bool
    neg: bool


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the geometry of a strided tensor."""
    dtype = tensor.dtype
    return Geometry(
        dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        dtype.is_complex and tensor.is_conj(),
        tensor.is_neg(),
    )


def geometry_of_result(tensor: Tensor) -> Geometry:
    """Return the geometry of a tensor over memory that an operator has just made: that is never a negative view."""
    # This is done for every result of every operator; the constructor that NamedTuple makes takes three times as long.
    dtype = tensor.dtype
    return _tuple_new(
        Geometry,
        (
            dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            dtype.is_complex and tensor.is_conj(),
            False,
        ),
    )


def look(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return a tensor of that geometry over the storage of ``tensor``, with no tie to autograd."""
    if geometry.dtype is tensor.dtype and not (geometry.conj or geometry.neg or tensor.is_conj() or tensor.is_neg()):
        return tensor.as_strided(geometry.size, geometry.stride, geometry.offset)
    view = torch.empty(0, dtype=geometry.dtype, device=tensor.device)
    view.set_(tensor.untyped_storage(), geometry.offset, geometry.size, geometry.stride)
    if geometry.conj:
        view = torch._conj(view)
    return torch._neg_view(view) if geometry.neg else view


def fresh(geometry: Geometry, device: torch.device) -> Tensor:
    """Return uninitialised memory of that geometry, for an operator that overwrites all of it."""
    return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=device)


def covers_storage(tensor: Tensor) -> bool:
    """Tell whether writing all of ``tensor`` overwrites every byte of its storage."""
    return (
        tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        and torch.ops.aten.is_non_overlapping_and_dense.default(tensor) is True
    )


def private_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the whole storage of ``tensor``, seen through the same geometry."""
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return look(everything.clone(), geometry_of(tensor))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one geometry hold the same bits, NaNs included."""
    a, b = (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in (a, b))
    a, b = (one.resolve_neg().contiguous().view(torch.uint8) if one.numel() else one for one in (a, b))
    return torch.equal(a, b)


_PLAIN_TYPES: dict[type, bool] = {}
_STRIDED = torch.strided


def is_strided(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` has a storage of its own, as sparse, nested and some subclasses' tensors have not."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        plain = _PLAIN_TYPES.get(kind)
        if plain is None:
            plain = _PLAIN_TYPES[kind] = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        if not plain:
            return False
    return tensor.layout is _STRIDED and not tensor.is_nested


def is_plain(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is fully described by a storage and a geometry.

    Sparse, nested and mkldnn layouts, zero tensors and subclasses with a dispatch of their own are not. Nor are
    inference tensors, since writes to them leave no trace in a version counter.
    """
    return is_strided(tensor) and not tensor._is_zerotensor() and not tensor.is_inference()
