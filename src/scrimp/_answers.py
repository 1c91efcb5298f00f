"""What data answered when a step asked it something: how many, which, how far. A rehearsal without data is told so."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def asks_data(func: OpOverload) -> bool:
    """Tell whether what an operator returns, or the shape of that, may not be known without data."""
    if not _TAGS.isdisjoint(func.tags):
        return True
    schema = func._schema
    return func.namespace not in ("aten", "prims") and not any(one.alias_info for one in schema.arguments)


@final
class Answers:
    """What a step that runs with data was answered, operator by operator, in order."""

    def __init__(self) -> None:
        self._given: dict[OpOverload, list[Any]] = {}

    def note(self, func: OpOverload, result: Any) -> None:
        """Remember what an operator returned: a number, or what its tensors look like."""
        if asks_data(func):
            self._given.setdefault(func, []).append(tree_map_only(Tensor, _outlined, result))

    def told_again(self) -> Reader:
        """Return what tells all of it once more, from the beginning."""
        return Reader(self._given)


@final
class Reader:
    """Tells a step without data what the same step with data was answered."""

    def __init__(self, given: dict[OpOverload, list[Any]]) -> None:
        self._given = given
        self._told: Counter[OpOverload] = Counter()

    def next(self, func: OpOverload) -> Any:
        """Return what the operator returned when it was called for as many times as it has been asked for here.

        None where that is not known.
        """
        if not self._given or not asks_data(func):
            return None
        number, given = self._told[func], self._given.get(func, ())
        self._told[func] += 1
        return tree_map_only(Tensor, _outlined, given[number]) if number < len(given) else None


def least(func: OpOverload, args: Sequence[Any]) -> Any:
    """Return the smallest answer that lets a step go on, where there is one to guess; otherwise None."""
    if func is aten._local_scalar_dense.default:
        return 1
    if func is aten.nonzero.default:
        return args[0].new_empty_strided((1, args[0].ndim), (1, 1), dtype=torch.long)
    if func is aten.masked_select.default:
        return args[0].new_empty((1,))
    if func is aten.index.Tensor:
        return func(args[0], [one for index in args[1] for one in _one_place(index)])
    return None


def _one_place(index: Tensor | None) -> list[Tensor | None]:
    """Return indices of a single element instead of a mask."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty((1,), dtype=torch.long) for _ in range(index.ndim)]


def _outlined(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
