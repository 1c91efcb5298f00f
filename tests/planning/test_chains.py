"""Blocks of a chain, and schedules that recompute them more than once."""

from __future__ import annotations

from functools import cache

import pytest

from scrimp._index import index
from scrimp._plan import Drop
from scrimp._simulate import simulate
from scrimp._solve import plan
from scrimp._solve._blocks import find_blocks

from .models import chain, gpt, unet

MIB = 1 << 20


@cache
def revolve(steps: int, slots: int) -> float:
    """Fewest step replays to reverse ``steps`` steps whose inputs fit into ``slots``, the first being there.

    The last step is replayed by nobody: its input is all that its backward needs.
    """
    if steps <= 1:
        return 0
    if slots == 0:
        return float("inf")
    return min(first + revolve(steps - first, slots - 1) + revolve(first, slots) for first in range(1, steps))


def test_the_oracle_knows_the_binomial_numbers() -> None:
    """With one slot, reversing n steps replays n(n-1)/2; with enough, n-1 are passed once."""
    assert revolve(6, 1) == 15
    assert revolve(6, 5) == 5


def test_a_transformer_is_a_chain_of_half_layers() -> None:
    """Blocks hand the residual stream to each other, twice a layer; every droppable value is in one place."""
    facts = index(gpt(layers=4))
    blocks = find_blocks(facts)
    assert len(blocks) >= 8
    placed = [value for block in blocks for value in block.values]
    handed = [block.entry for block in blocks if block.entry is not None]
    assert sorted(placed + handed) == sorted(facts.droppable)
    assert [block.first for block in blocks[1:]] == [block.last + 1 for block in blocks[:-1]]


def test_long_skips_join_blocks() -> None:
    """Values read far away cross every cut between: what they span is no chain."""
    facts = index(unet(depth=2))
    for block in find_blocks(facts)[1:]:
        assert block.entry in facts.droppable


@pytest.mark.parametrize("held", [4, 6, 8, 12])
def test_equal_steps_are_scheduled_like_revolve(held: int) -> None:
    """A loop of 40 equal steps within a few values is replayed as rarely as the optimum, or once more."""
    trace = chain(40, nbytes=MIB, seconds=1e-3)
    made = plan(trace, held * MIB)
    replays = simulate(trace, made).replay_seconds / trace.ops[1].seconds
    best = revolve(40, held - 1) - 39  # the forward pass itself passes all steps but the last, once
    assert best - 0.5 < replays < best + 1.5


def test_little_memory_needs_several_passes() -> None:
    """Below the square root of the length, some values are computed and let go before they are retained."""
    made = plan(chain(40, nbytes=MIB), 7 * MIB)
    assert any(isinstance(decision, Drop) and decision.passes > 0 for decision in made.decisions.values())


def test_a_long_chain_fits_far_below_the_root_of_its_length() -> None:
    """A loop of 200 steps within nine values takes a twentieth more replays than the optimum at most."""
    trace = chain(200, nbytes=MIB, seconds=1e-3)
    made = plan(trace, 9 * MIB)
    replays = simulate(trace, made).replay_seconds / trace.ops[1].seconds
    assert replays < 1.05 * (revolve(200, 8) - 199)
