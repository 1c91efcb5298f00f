"""Running an operator below a dispatch mode.

Where a mode sees an operator, PyTorch (2.11 to 2.13) has switched off what resolves lazily conjugated, negative and
zero tensors, for everything that the operator's kernel calls. A kernel that conjugates one matrix and multiplies by it,
as that of ``torch.linalg.pinv`` does, then computes with the matrix as it was. Here that is switched on again.

So is what counts writes, for operators that leave counting to those which their kernels call, such as ``_foreach_add_``
on a CPU. Their version counters would stand still: autograd would not notice that a saved tensor was overwritten, nor
that a view's history is another one after a write to its base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

# By id, since the hash of an operator is computed in Python; so none of them may be destroyed.
_counting: dict[int, bool] = {}
_held: list[OpOverload] = []


def passed_on(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that a dispatch mode was shown, as it runs without one."""
    first = args[0] if args else None
    is_complex = isinstance(first, Tensor) and first.is_complex()
    counts = _counting.get(id(func))
    if counts is None:
        _held.append(func)
        counts = _counting[id(func)] = func._schema.is_mutable and not counted_above(func)
    if not is_complex and not counts:
        return func(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if is_complex:
        excluded = with_lazy_views(excluded)
    if counts and not torch.is_inference_mode_enabled():  # in which nothing is counted anyway
        excluded = excluded.remove(DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


def counted_above(func: OpOverload) -> bool:
    """Tell whether autograd itself counts what an operator writes, once it has returned to it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(str(func._name), DispatchKey.ADInplaceOrView)


def with_lazy_views(excluded: DispatchKeySet) -> DispatchKeySet:
    """Return the keys without those that resolve lazily conjugated, negative and zero tensors."""
    return excluded.remove(DispatchKey.Conjugate).remove(DispatchKey.Negative).remove(DispatchKey.ZeroTensor)
