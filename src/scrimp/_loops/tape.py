"""The way forward through a loop: states are kept, and what backward will need to know is noted."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import Node

from scrimp._loops.conditions import Conditions
from scrimp._loops.entry import Behind, Entry, Gate
from scrimp._loops.form import Leaves
from scrimp._loops.graph import borders
from scrimp._loops.keep import Keeper
from scrimp._loops.outside import Outside, sequence_number
from scrimp._loops.patience import Patience
from scrimp._loops.progress import Report
from scrimp._loops.seal import Seal
from scrimp._loops.stack import Stacks
from scrimp._loops.step import Frame, Ran, Step, slice_of
from scrimp._loops.substitute import Substitute, in_use
from scrimp._loops.watch import Watch


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
    depends_on: Sequence[Tensor]
    """What the loop is given and requires grad; let go when it is over, since its node in the graph has it."""
    conditions: Conditions = field(default_factory=Conditions.now)
    outside: Outside = field(default_factory=Outside)
    patience: Patience = field(default_factory=Patience)
    watch: Watch = field(init=False)
    patterns: Patterns = field(default_factory=Patterns)
    borders: dict[int, Tensor] = field(default_factory=dict)
    """Tensors from outside that gradients go to."""
    length: int = 0
    has_loops: bool = False
    """Some steps have loops in them."""
    last: Seal = ()
    """Of what the last step returned."""
    around: Sequence[Substitute] = field(default_factory=in_use)
    """Of loops around this one, in whose steps it runs."""
    _behind: tuple[int, Tensor] | None = None
    """What arguments depend on; made again when more tensors from outside are known."""

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
        with self.patience, self.conditions.in_force():
            self.keeper.start(state, xs, self.outside)
            while most is None or self.length < most:
                if until is not None and self._ask(until, state):
                    break
                self.keeper.arrive(self.length, state)
                state = self._one(state, slice_of(xs, self.length), stacks)
                self.length += 1
                self.report.forward(self.length, self.patience)
            self.watch.begin(())
            self.watch.finished = True
            self.outside.finish()
            self.keeper.finish(self.length)
            self.depends_on, self._behind = (), None
        return state

    def _one(self, frame: Frame, x: list[Any], stacks: Stacks) -> Frame:
        since, gate = sequence_number(), Gate()
        arguments, x, entry = self._enter(frame.arguments(), x, gate)
        given = [leaf for leaf in (*arguments, *x) if isinstance(leaf, Tensor)]
        self.watch.begin(given)
        with self.watch:
            ran = self.step.run(arguments, x, self.patience)
        gate.over = True
        self.watch.end()
        arrived = {id(leaf) for leaf in given}
        found, has_loops = borders(ran.tensors(), arrived, entry, self.outside.sources, since, self.watch.made)
        for tensor in found:
            self.borders.setdefault(id(tensor), tensor)
        self.has_loops = self.has_loops or has_loops
        self.patterns.add(self.length, ran)
        stacks.add(self.length, ran.output)
        return Frame.of(ran.state)

    def _enter(self, arguments: Leaves, x: Leaves, gate: Gate) -> tuple[Leaves, Leaves, Node | None]:
        """Put what stands for earlier steps behind the arguments that require grad."""
        leaves = [*arguments, *x]
        wanted = {id(leaf): leaf for leaf in leaves if _wants(leaf)}
        if not wanted:
            return arguments, x, None
        if self._behind is None or self._behind[0] != len(self.borders):
            own = torch.zeros((), requires_grad=True)  # also a leaf that a step made can be what an argument depends on
            self._behind = len(self.borders), Behind.apply(own, *self.depends_on, *self.borders.values())  # type: ignore[no-untyped-call]
        bare = [leaf.detach() for leaf in wanted.values()]
        entered: tuple[Tensor, ...] = Entry.apply(gate, bare, self._behind[1])  # type: ignore[no-untyped-call]
        handed = dict(zip(wanted, entered, strict=True))
        leaves = [handed.get(id(leaf), leaf) for leaf in leaves]
        return leaves[: len(arguments)], leaves[len(arguments) :], entered[0].grad_fn

    def _ask(self, until: Callable[[Any], Any], frame: Frame) -> bool:
        state = self.step.tree([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in frame.leaves])
        self.watch.begin([leaf for leaf in frame.leaves if isinstance(leaf, Tensor)])
        self.watch.pure = True
        try:
            with torch.no_grad(), self.watch:
                return bool(self.patience.call(until, state))
        finally:
            self.watch.pure = False


def _wants(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
