"""Plans against what people do today: checkpointing by blocks, and keeping the results of matrix products."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable

import pytest

import scrimp
from models import MODELS
from scrimp._index import Index, index
from scrimp._plan import Decision, Drop, Keep
from scrimp._simulate import simulate
from scrimp._trace import Trace
from scrimp.errors import TraceWarning

BLOCKS = {
    "gpt2": r".*\bh\.\d+",
    "llama": r"blocks\.\d+",
    "bert_large": r".*\blayer\.\d+",
    "vit_l": r".*\b(layer|layers|encoder_layer)[._]\d+",
    "t5": r".*\b(encoder|decoder)\.block\.\d+",
    "mixtral": r".*\blayers\.\d+",
}
QUICK = ("gpt2", "mixtral")
PRODUCTS = re.compile(r"\b(mm|addmm|bmm|baddbmm)\b|scaled_dot_product")


@functools.cache
def trace_of(name: str) -> Trace:
    """The step of a model in its real size, on an H200 that need not be there."""
    module, make_batch = MODELS[name](tiny=False, device="meta")
    with warnings.catch_warnings():  # transformers ask whether tokens are valid, which is taken to be so
        warnings.simplefilter("ignore", TraceWarning)
        return scrimp.trace_on("H200", module, *make_batch())


def checkpointed(facts: Index, pattern: str, every: int, keep: Callable[[str], bool]) -> dict[int, Decision]:
    """Keep what blocks hand on, and in each so-manieth block drop the rest but for the results of some operators."""
    found = [re.match(pattern, op.module) for op in facts.trace.ops]
    block_of = [match.group(0) if match else "" for match in found]
    blocks = list(dict.fromkeys(block for block in block_of if block))
    assert len(blocks) >= 8
    chosen = set(blocks[::every])
    decisions: dict[int, Decision] = {}
    for value, owner in enumerate(facts.owner):
        stays_inside = owner >= 0 and all(block_of[reader] == block_of[owner] for reader in facts.readers[value])
        if value in facts.droppable and stays_inside and block_of[owner] in chosen:
            decisions[value] = Keep() if keep(facts.trace.ops[owner].name) else Drop()
        elif value in facts.holdable and not stays_inside:
            decisions[value] = Keep()
    return decisions


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
@pytest.mark.parametrize(
    ("every", "keep"),
    [
        pytest.param(1, lambda _: False, id="every block"),
        pytest.param(2, lambda _: False, id="every second block"),
        pytest.param(1, lambda op: bool(PRODUCTS.search(op)), id="all but matrix products"),
    ],
)
def test_no_alternative_is_faster_in_its_memory(name: str, every: int, keep: Callable[[str], bool]) -> None:
    """Within the bytes that checkpointing by blocks takes there is a plan, and it takes no longer."""
    trace = trace_of(name)
    theirs = simulate(trace, checkpointed(index(trace), BLOCKS[name], every, keep))
    assert theirs.replay_seconds > 0
    assert scrimp.plan(trace, theirs.peak).seconds <= theirs.seconds
