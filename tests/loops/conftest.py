"""What the suites of loops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree


def plain_scan(step: Callable[..., Any], state: Any, xs: Any = None, length: int | None = None, **_: Any) -> Any:
    """The loop written plainly."""
    slices, spec = pytree.tree_flatten(xs) if xs is not None else ([], None)
    columns = [one.unbind(0) for one in slices]
    outputs = []
    for number in range(len(columns[0]) if length is None else length):
        x = pytree.tree_unflatten([one[number] for one in columns], spec) if spec else None
        state, output = step(state, x)
        outputs.append(output)
    if not outputs:
        return state, None
    flat = [pytree.tree_flatten(one)[0] for one in outputs]
    stacked = [None if one[0] is None else torch.stack(one) for one in zip(*flat, strict=True)]
    return state, pytree.tree_unflatten(stacked, pytree.tree_flatten(outputs[0])[1])


@pytest.fixture
def plain() -> Callable[..., Any]:
    """The loop written plainly, with the arguments of ``scrimp.scan``."""
    return plain_scan
