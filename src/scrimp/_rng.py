"""Random generators: which one an operator draws from, and how to draw the same again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """The generator that an operator draws from, and its state just before."""

    generator: torch.Generator
    state: Tensor


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators on ``device`` use when none is passed, if that device has one."""
    if device.type in ("cpu", "meta"):  # on meta nothing is drawn; what is only described counts as repeatable
        return torch.default_generator
    backend = getattr(torch, device.type, None)
    generators: Sequence[torch.Generator] = getattr(backend, "default_generators", ())
    if not generators:
        return None
    index = device.index if device.index is not None else backend.current_device()
    return generators[index]


def draw_before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
    """Note the state of the generator that a random operator with these arguments is about to use."""
    generator = None
    device = torch.device(kwargs.get("device") or "cpu")
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Generator):
            generator = argument
            break
        if isinstance(argument, Tensor) and device.type == "cpu":
            device = argument.device
    generator = generator or default_generator(device)
    return None if generator is None else Draw(generator, generator.get_state())


@contextmanager
def drawn_again(draw: Draw | None) -> Iterator[None]:
    """Set the generator back for the block; afterwards it goes on as if the block had not happened."""
    if draw is None:
        yield
        return
    now = draw.generator.get_state()
    draw.generator.set_state(draw.state)
    try:
        yield
    finally:
        draw.generator.set_state(now)
