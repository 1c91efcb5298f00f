"""Rules for shapes that PyTorch's own, those of the ``meta`` device, do not get right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def own_rule(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what an operator makes of descriptions, where PyTorch's rule refuses what its kernels take."""
    return _grouped_product(*args, **kwargs) if func is aten._grouped_mm.default else None


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Describe the products of groups of rows; PyTorch's rule (2.11 to 2.13) knows of no type but bfloat16."""
    shape: tuple[int, ...]
    if a.ndim == b.ndim == 2:
        assert offs is not None, "the groups of two matrices are ranges of what they share"
        shape = (offs.numel(), a.shape[0], b.shape[1])
    elif a.ndim == b.ndim == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[-2], b.shape[-1])
    return torch.empty(shape, dtype=out_dtype or a.dtype, device="meta")
