"""The way forward through a loop: states are kept, and what backward will need to know is noted."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from scrimp._loops.conditions import Conditions
from scrimp._loops.graph import borders
from scrimp._loops.keep import Keeper
from scrimp._loops.outside import Outside, sequence_number
from scrimp._loops.progress import Report
from scrimp._loops.stack import Stacks
from scrimp._loops.step import Frame, Ran, Step, slice_of
from scrimp._loops.watch import Watch
from scrimp.errors import LoopError


class Pattern(NamedTuple):
    """What is the same for many steps."""

    wants: tuple[bool, ...]
    """Which leaves of the new state require grad."""
    aliases: tuple[tuple[int, int], ...]
    """Which leaves of the output are the very tensors that leaves of the new state are: (output, state)."""


@final
@dataclass(slots=True)
class Patterns:
    """The pattern of every step; they seldom change."""

    _starts: list[int] = field(default_factory=list)
    _patterns: list[Pattern] = field(default_factory=list)

    def add(self, step: int, ran: Ran) -> None:
        """Take note of a step that ran."""
        places = {id(leaf): place for place, leaf in enumerate(ran.state) if _wants(leaf)}
        pattern = Pattern(
            tuple(_wants(leaf) for leaf in ran.state),
            tuple((place, places[id(leaf)]) for place, leaf in enumerate(ran.output) if id(leaf) in places),
        )
        if not self._patterns or self._patterns[-1] != pattern:
            self._starts.append(step)
            self._patterns.append(pattern)

    def __getitem__(self, step: int) -> Pattern:
        return self._patterns[bisect.bisect_right(self._starts, step) - 1]


@final
@dataclass(slots=True)
class Tape:
    """A loop that ran forward, and all that backward needs of it besides its arguments."""

    step: Step
    keeper: Keeper
    report: Report
    conditions: Conditions = field(default_factory=Conditions.now)
    outside: Outside = field(default_factory=Outside)
    watch: Watch = field(init=False)
    patterns: Patterns = field(default_factory=Patterns)
    borders: dict[int, Tensor] = field(default_factory=dict)
    """Tensors from outside that gradients go to."""
    length: int = 0

    def __post_init__(self) -> None:
        self.watch = Watch(self.outside)

    def forward(
        self,
        state: Frame,
        xs: Sequence[Tensor],
        most: int | None,
        until: Callable[[Any], Any] | None,
        stacks: Stacks,
    ) -> Frame:
        """Run the loop, ``most`` steps at most; return its final state."""
        with self.conditions.in_force():
            self.keeper.start(state, xs, self.outside)
            while most is None or self.length < most:
                if until is not None and self._ask(until, state):
                    break
                self.keeper.arrive(self.length, state)
                state = self._one(state, slice_of(xs, self.length), stacks)
                self.length += 1
                self.report.forward(self.length)
            self.watch.begin(())
            self.watch.finished = True
            self.outside.finish()
            self.keeper.finish(self.length)
        return state

    def _one(self, frame: Frame, x: list[Any], stacks: Stacks) -> Frame:
        arguments = frame.arguments()
        given = [leaf for leaf in (*arguments, *x) if isinstance(leaf, Tensor)]
        self.watch.begin(given)
        since = sequence_number()
        gate = _Gate()
        for leaf in given:
            if leaf.requires_grad:
                leaf.register_hook(gate)  # type: ignore[no-untyped-call]
        with self.watch:
            ran = self.step.run(arguments, x)
        gate.closed = True
        self.watch.end()
        for tensor in borders(ran.tensors(), {id(leaf) for leaf in given}, self.outside.sources, since):
            self.borders.setdefault(id(tensor), tensor)
        self.patterns.add(self.length, ran)
        stacks.add(self.length, ran.output)
        return Frame.of(ran.state)

    def _ask(self, until: Callable[[Any], Any], frame: Frame) -> bool:
        state = self.step.tree([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in frame.leaves])
        self.watch.begin([leaf for leaf in frame.leaves if isinstance(leaf, Tensor)])
        self.watch.pure = True
        try:
            with torch.no_grad(), self.watch:
                return bool(until(state))
        finally:
            self.watch.pure = False


class _Gate:
    """A hook that lets gradients pass while a step runs, which may differentiate, and no more when it is over."""

    closed = False

    def __call__(self, gradient: Tensor) -> None:
        if self.closed:
            raise LoopError(
                "a tensor that a step of the loop left outside was differentiated, and its graph ends where that step "
                "began; return it as an output of the step"
            )


def _wants(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
