"""Arguments that a call overwrites without reading them: for its replay, any memory of their geometry will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scrimp._geometry import covers_storage
from scrimp._operators import Operator
from scrimp._value import Blank


def blanks(written: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return those of ``written`` that cover their storage, and are not ``given`` as another argument as well."""
    return [tensor for tensor in written if covers_storage(tensor) and sum(one is tensor for one in given) == 1]


def is_among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Tell whether it is one of these tensor objects."""
    return any(tensor is one for one in tensors)


def without_averages(facts: Operator, noted_args: list[Any]) -> list[Any]:
    """Leave out running averages, which a replay can do without, so that they get no memory in it."""
    return [
        None if isinstance(noted, Blank) and isinstance(argument.type, torch.OptionalType) else noted
        for noted, argument in zip(noted_args, facts.func._schema.arguments, strict=False)
    ]
