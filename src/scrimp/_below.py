"""Running an operator below a dispatch mode.

Where a mode sees an operator, PyTorch (2.11 to 2.13) has switched off what resolves lazily conjugated, negative and
zero tensors, for everything that the operator's kernel calls. A kernel that conjugates one matrix and multiplies by it,
as that of ``torch.linalg.pinv`` does, then computes with the matrix as it was. Here that is switched on again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload


def passed_on(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that a dispatch mode was shown, as it runs without one."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_complex():
        return func(*args, **kwargs)
    excluded = with_lazy_views(torch._C._dispatch_tls_local_exclude_set())
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


def with_lazy_views(excluded: DispatchKeySet) -> DispatchKeySet:
    """Return the keys without those that resolve lazily conjugated, negative and zero tensors."""
    return excluded.remove(DispatchKey.Conjugate).remove(DispatchKey.Negative).remove(DispatchKey.ZeroTensor)
