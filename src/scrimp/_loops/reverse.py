"""The way back through a loop: states come back as the schedule says, and each step is differentiated on its own.

A tensor that many steps use gets its gradient as autograd would give it: one summand after the other, in the order of
the plain loop's backward pass. For that, what has been summed up so far is handed to the next graph as the gradient of
the tensor itself, and so comes first in its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable

from scrimp._loops.graph import borders, loops_behind
from scrimp._loops.outside import sequence_number
from scrimp._loops.patience import Patience
from scrimp._loops.schedule import Advance, Drop, Load, Reverse, Save, backward
from scrimp._loops.seal import agree, seal
from scrimp._loops.step import Frame, Ran, slice_of
from scrimp._loops.substitute import Substitute
from scrimp._loops.tape import Tape
from scrimp.errors import GraphFreedError, LoopError

Gradient = Tensor | None


@final
class Reversal:
    """One backward pass through one loop."""

    def __init__(
        self,
        tape: Tape,
        first: Frame,
        xs: Sequence[Tensor],
        by_state: Sequence[Gradient],
        by_output: Sequence[Gradient],
        keep: bool,
    ) -> None:
        shelf = tape.keeper.shelf
        if 0 not in shelf:
            raise GraphFreedError(
                "the states of a loop were freed by an earlier backward pass; pass retain_graph=True to that one"
            )
        self._tape = tape
        self._shelf = shelf.copy() if keep else shelf
        self._shelf.first(replace(first, snapshot=shelf.take(0).snapshot))
        self._xs = xs
        self._by_output = by_output
        self._keep = keep
        self._patience = Patience()
        self._outer = list(tape.borders.values())
        self._substitute = Substitute(self._outer)
        self._targets = [self._substitute.of(tensor) for tensor in self._outer]
        self._checked = False
        self._aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.by_state = list(by_state)
        self.by_outer: list[Gradient] = [None] * len(self._outer)
        self.by_xs: list[Gradient] = [None] * len(xs)

    def run(self, sums: dict[int, Gradient] | None = None) -> None:
        """Go all the way back; the gradients are in ``by_state``, ``by_outer`` and ``by_xs`` then.

        ``sums`` are those that a loop around this one has, of tensors that only loops in its steps use: the summands of
        this loop are added to them one by one, and not as one.
        """
        tape = self._tape
        if sums:
            self.by_outer = [sums.get(id(tensor)) for tensor in self._outer]
        tape.outside.check_unchanged()
        with self._patience:
            now = tape.outside.snapshot()
            try:
                with tape.conditions.in_force() as self._aside:
                    self._follow()
            except BaseException:
                if not self._keep:
                    self._shelf.clear()  # as autograd does, which has freed the graph behind a node that fails
                raise
            finally:
                tape.outside.put(now)
        if sums is not None:
            for place, tensor in enumerate(self._outer):
                if id(tensor) in sums:
                    sums[id(tensor)], self.by_outer[place] = self.by_outer[place], None

    def _follow(self) -> None:
        tape, held = self._tape, self._tape.keeper.held
        current = None if held is None else self._take(held)
        if held is not None:
            self._shelf.drop(held)
        if self._shelf.near is not None:
            self._shelf.near = max(self._shelf.near - 1, 0)  # one is the current state
        saved = list(self._shelf)
        slots = tape.keeper.slots_left(len(saved))
        for action in backward(tape.length, saved, slots, held):
            match action:
                case Load(step):
                    current = self._take(step)
                case Advance(start, stop):
                    for step in range(start, stop):
                        assert current is not None
                        current = self._again(current, step)
                case Save(step):
                    assert current is not None
                    self._shelf.put(step, tape.keeper.complete(current))
                case Reverse(step):
                    assert current is not None
                    frame, current = current, None
                    self._reverse(frame, step)
                    tape.report.backward(tape.length - step, tape.length, self._patience)
                case Drop(step):
                    self._shelf.drop(step)

    def _take(self, step: int) -> Frame:
        frame = self._shelf.take(step)
        frame.check_unchanged()
        assert frame.snapshot is not None
        self._tape.outside.put(frame.snapshot)
        return frame

    def _again(self, frame: Frame, step: int) -> Frame:
        self._tape.report.repeated += 1
        return Frame.of(self._tape.step.run(frame.arguments(), slice_of(self._xs, step), self._patience).state)

    # -- one step ---------------------------------------------------------------------------------------------------

    def _reverse(self, frame: Frame, step: int) -> None:
        arguments, x = frame.arguments(), slice_of(self._xs, step)
        since = sequence_number()
        ran = self._run(arguments, x)
        if self._substitute or not self._checked:
            self._check(ran, since)
        pattern = self._tape.patterns[step]
        if tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in ran.state) != pattern.wants:
            raise LoopError(
                f"step {step} of the loop did something else when it ran again for backward: other parts of its state "
                "require grad. Steps must depend on nothing but their arguments and tensors"
            )
        if step + 1 == self._tape.length:
            self._check_last(ran)
        handed = self._hand_on(ran)
        roots = self._seeds(arguments, step, handed) + self._roots(ran, step)
        inputs = {id(leaf): leaf for leaf in (*arguments, *x) if isinstance(leaf, Tensor) and leaf.requires_grad}
        wanted = [*inputs.values(), *self._targets]
        gradients: Sequence[Gradient] = [None] * len(wanted)
        if roots and wanted:
            tensors, given = zip(*roots, strict=True)
            with self._aside():
                # As torch.autograd.grad does it, which checks arguments for longer than a small step runs.
                gradients = Variable._execution_engine.run_backward(
                    tensors, given, False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
                )
        found = dict(zip(inputs, gradients, strict=False))
        self.by_state = [found.get(id(leaf)) for leaf in arguments]
        self.by_outer = [
            handed.get(id(target), gradient)
            for target, gradient in zip(self._targets, gradients[len(inputs) :], strict=True)
        ]
        for place, leaf in enumerate(x):
            self._enter_x(place, step, found.get(id(leaf)))

    def _run(self, arguments: list[Any], x: list[Any]) -> Ran:
        self._tape.report.repeated += 1
        with ExitStack() as stack:
            for one in (*self._tape.around, self._substitute):
                if one:
                    stack.enter_context(one)
            if self._checked:
                return self._tape.step.run(arguments, x, self._patience)
            watch = self._tape.watch
            watch.begin([leaf for leaf in (*arguments, *x) if isinstance(leaf, Tensor)])
            with watch:
                return self._tape.step.run(arguments, x, self._patience)

    def _check(self, ran: Ran, since: int) -> None:
        """Raise if the step depends on other tensors than it did the first time."""
        tape = self._tape
        arguments = {id(leaf) for leaf in (*ran.arguments, *ran.x)}
        known = {id(target) for target in self._targets}
        was_watched, self._checked = not self._checked, True
        found, _ = borders(ran.tensors(), arguments, None, tape.outside.sources, since, tape.watch.made)
        for tensor in found:
            if id(tensor) not in known and (was_watched or not tensor.is_leaf):
                raise LoopError(
                    f"a step of the loop reads a tensor of shape {list(tensor.shape)} as it runs again for backward "
                    "that it did not read the first time, or takes it into a custom autograd.Function, where scan "
                    "cannot tell it apart from what is behind it. Make it a part of the state or of xs"
                )

    def _check_last(self, ran: Ran) -> None:
        """Raise if the last step did not give what it gave in forward."""
        outputs = [leaf for leaf in ran.output if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not self._tape.watch.varies and not agree(seal([*ran.state, *outputs]), self._tape.last):
            raise LoopError(
                "the last step of the loop gave something else when it ran again for backward, so it depends on what "
                "scan() cannot set back: a generator of its own such as numpy.random.default_rng, a Python counter, a "
                "module that was switched between train() and eval(), or memory that was written past PyTorch. Make "
                "it a part of the state or of xs"
            )

    def _hand_on(self, ran: Ran) -> dict[int, Gradient]:
        """Give the sums of tensors that only loops in this step use to those loops; they put back what they add up."""
        if not self._tape.has_loops:
            return {}
        loops, of_loops = loops_behind(ran.tensors(), self._targets)
        handed: dict[int, Gradient] = {
            id(target): sum_
            for target, sum_ in zip(self._targets, self.by_outer, strict=True)
            if id(target) in of_loops
        }
        for loop in loops:
            loop.sums = handed
        return handed

    def _seeds(
        self, arguments: Sequence[Any], step: int, handed: Mapping[int, Gradient]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return what the sums of this step's graph begin with."""
        seeds = [
            (to, sum_)
            for to, sum_ in zip(self._targets, self.by_outer, strict=True)
            if sum_ is not None and id(to) not in handed
        ]
        if step:
            for place, of_state in self._tape.patterns[step - 1].aliases:
                gradient = self._by_output[place]
                if gradient is not None and arguments[of_state].requires_grad:
                    seeds.append((arguments[of_state], gradient[step - 1]))
        return seeds

    def _roots(self, ran: Ran, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return what the step returned, with the gradients that are known of it."""
        roots: dict[int, tuple[Tensor, Tensor]] = {}
        for leaf, gradient in zip(ran.state, self.by_state, strict=True):
            if gradient is not None and leaf.requires_grad:
                roots.setdefault(id(leaf), (leaf, gradient))
        found = list(roots.values())
        is_last = step + 1 == self._tape.length
        aliased = {place for place, _ in self._tape.patterns[step].aliases}
        for place, leaf in enumerate(ran.output):
            gradient = self._by_output[place]
            if gradient is None or not leaf.requires_grad or (place in aliased and not is_last):
                continue  # of an alias, the next step's graph has begun with it
            found.append((leaf, gradient[step]))
        return found

    def _enter_x(self, place: int, step: int, gradient: Gradient) -> None:
        if gradient is None:
            return
        whole = self.by_xs[place]
        if whole is None:
            whole = self.by_xs[place] = torch.zeros(
                self._xs[place].shape, dtype=self._xs[place].dtype, device=self._xs[place].device
            )
        whole[step].copy_(gradient)
