"""Whether a function draws random numbers, and so is another one at each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .report import OnFail, report_random


@contextmanager
def drawing_reported(device: torch.device, on_fail: OnFail) -> Iterator[None]:
    """Say it if random numbers were drawn inside.

    Where a state has few elements two masks of a dropout are often the same, and a solution of one passes every check.
    """
    before = _states(device)
    yield
    if any(not torch.equal(now, then) for now, then in zip(_states(device), before, strict=True)):
        report_random(on_fail)


def _states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a function on the device draws from unless it brings its own."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.default_generators[device.index or 0].get_state())
    return states
