"""No collection of garbage while threads of ours run, in versions of Python where one could stop them for ever.

Before Python 3.12 a collection runs wherever an object is made, also within ``torch.get_rng_state``, where the thread
holds the generator's lock. What is collected may run Python code and so hand the interpreter to another thread; if that
one asks for the same state it waits for the lock and does not hand the interpreter back. Checkpoints ask for it, in
forward and in backward.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from scrimp._engine.interrupted import undone

COLLECTS_ANYWHERE = sys.version_info < (3, 12)


class _Pause:
    """Who wants no collections now, and whether they were on before the first of them."""

    def __init__(self) -> None:
        self._blocks: set[object] = set()
        self._were_on = False

    def begin(self, block: object) -> None:
        """Collect nothing until ``block`` ends."""
        if not self._blocks:
            self._were_on = gc.isenabled()
        self._blocks.add(block)
        gc.disable()

    def end(self, block: object) -> None:
        """Collect again, if no other wants otherwise."""
        self._blocks.discard(block)
        if self._were_on and not self._blocks:
            gc.enable()

    def end_all(self) -> None:
        """None of their threads is left: this is another process."""
        if self._blocks:
            self._blocks.clear()
            self.end(None)


_pause = _Pause()
if COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pause.end_all)


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage while the context is open, where a collection could stop threads for ever."""
    if not COLLECTS_ANYWHERE:
        yield
        return
    block = object()
    try:
        _pause.begin(block)
        yield
    finally:
        undone(partial(_pause.end, block))
