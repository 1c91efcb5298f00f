"""What is noted of a step's results tells others from the same ones, whatever they look like in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scrimp._loops.seal import agree, seal

RESULTS: dict[str, Tensor | float | str | None] = {
    "plain": torch.arange(24.0).view(4, 6),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "odd start": torch.arange(9.0)[1:],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.ones(3, 1).expand(3, 5),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "booleans": torch.tensor([True, False, True]),
    "half": torch.arange(5).to(torch.bfloat16),
    "scalar": torch.tensor(float("nan")),
    "empty": torch.empty(0, 3),
    "number": float("nan"),
    "text": "one",
    "nothing": None,
}


@pytest.mark.parametrize("name", list(RESULTS))
def test_the_same_results_agree(name: str) -> None:
    """A copy, and a copy in another layout."""
    one = RESULTS[name]
    other = one.clone().contiguous() if isinstance(one, Tensor) else one
    assert agree(seal([one]), seal([other]))


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in ("empty", "nothing")])
def test_other_results_do_not(name: str) -> None:
    """One bit, one number, or one letter."""
    one: Any = RESULTS[name]
    if isinstance(one, Tensor):
        other: Any = one.clone().resolve_conj().contiguous()
        other.view(-1).view(torch.uint8)[-1] ^= 1
    else:
        other = 1.5 if isinstance(one, float) else one + "s"
    assert not agree(seal([one]), seal([other]))


def test_where_kernels_may_add_in_any_order_sums_have_to_be_close() -> None:
    """Off the CPU a sum and a norm are noted: a little off is the same, other numbers are not."""
    noted = torch.tensor([10.0, 100.0])
    assert agree((noted,), (torch.tensor([10.4, 99.0]),))
    assert not agree((noted,), (torch.tensor([25.0, 101.0]),))
    assert agree((torch.tensor([float("nan"), 1.0]),), (torch.tensor([float("nan"), 1.0]),))
