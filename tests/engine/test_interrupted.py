"""Ctrl-C while something is put back, and while code of others must not be interrupted."""

from __future__ import annotations

import signal

import pytest

from scrimp._engine.interrupted import interrupts_later, undone


def test_what_is_interrupted_while_it_is_undone_is_undone_all_the_same() -> None:
    """It is begun anew, twice here, and the interrupt surfaces when it is done."""
    seen: list[str] = []

    def undo() -> None:
        seen.append("begun")
        if len(seen) < 3:
            signal.raise_signal(signal.SIGINT)
        seen.append("done")

    with pytest.raises(KeyboardInterrupt):
        undone(undo)
    assert seen == ["begun", "begun", "begun", "done"]


def test_interrupts_that_came_in_the_block_surface_once_after_it() -> None:
    """The block runs to its end, and the next interrupt is as usual."""
    came: list[str] = []

    def block() -> None:
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            came.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert came == ["to its end"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_where_ctrl_c_does_nothing_it_still_does_nothing() -> None:
    """A program that ignores interrupts gets none."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_later():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)
