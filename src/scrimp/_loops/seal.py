"""Telling whether a step that ran again gave the same numbers as the first time, without keeping those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scrimp._geometry import is_plain

Seal: TypeAlias = tuple[Any, ...]
"""For each result of a step: a number that its bits add up to, or, off the CPU, its sum and norm; constants as such."""

_SHARE = 0.05
"""Off the CPU, kernels of one's own may add in any order: sums may differ by this share of the norm."""


def seal(results: Sequence[Any]) -> Seal:
    """Take note of results of a step."""
    with torch.no_grad():
        return tuple(_sealed(one.detach()) if isinstance(one, Tensor) else (one,) for one in results)


def agree(one: Seal, other: Seal) -> bool:
    """Tell whether both can be of the same results."""
    return len(one) == len(other) and all(map(_same, one, other))


def _sealed(tensor: Tensor) -> tuple[Any, ...] | Tensor | None:
    if not is_plain(tensor) or tensor.is_meta:
        return None
    if tensor.device.type == "cpu":
        return _bits(tensor)
    if not tensor.is_floating_point():
        return None
    return torch.stack([tensor.sum(dtype=torch.float32), torch.linalg.vector_norm(tensor, dtype=torch.float32)])


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of the bits, eight bytes at a time, and of what is left of them."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    flat = whole.view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    content = flat.view(torch.uint8)
    words = content.numel() // 8 * 8
    return content[:words].view(torch.int64).sum() + content[words:].sum()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if not one.is_floating_point():
            return bool(torch.equal(one, other))
        far = (one[0] - other[0]).abs() > _SHARE * torch.maximum(one[1], other[1])
        return not bool(far)  # also where there is something that is no number
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one == other or repr(one) == repr(other)  # NaN is NaN here
    return one is None or other is None or type(one) is type(other)
