"""``scrimp.scan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from scrimp._budget import Budget, parse_budget
from scrimp._compiler import never_compiled
from scrimp._loops.form import Form, Tree
from scrimp._loops.keep import Keeper
from scrimp._loops.node import Loop
from scrimp._loops.patience import Patience
from scrimp._loops.progress import Progress, Report
from scrimp._loops.seal import seal
from scrimp._loops.stack import Stacks, transformed
from scrimp._loops.step import Frame, Step, check_leaves
from scrimp._loops.tape import Tape
from scrimp.errors import BudgetError, LoopError, StoreError
from scrimp.store import Host, Store

State = TypeVar("State")


@never_compiled
def scan(
    step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    xs: Tree = None,
    length: int | None = None,
    *,
    until: Callable[[State], Any] | None = None,
    budget: Budget | None = None,
    slots: int | None = None,
    host: Store | Budget | None = None,
    disk: Store | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[State, Any]:
    """Run ``state, output = step(state, x)`` for each x, keeping only a few of the states for backward.

    Returns the final state and the outputs, stacked, as ``jax.lax.scan`` does. Gradients reach everything that the
    steps use, parameters and other tensors that ``step`` closes over included, and have the bits of the plain loop's.
    States that are not kept come back, in backward, by running steps again from those that are; see ``docs/loops.md``
    for what that asks of ``step``.

    Args:
        step: Takes the state and a slice of ``xs`` (or None), and returns the new state and an output (or None). States
            and outputs are any pytrees of tensors; numbers, strings and None may be parts of the state too.
        state: What the loop begins with.
        xs: A pytree of tensors, of which step ``i`` gets the ``i``-th slices along the first dimension.
        length: How many steps to run, at most; by default as many as ``xs`` has slices.
        until: Asked before each step: the loop ends when it is true of the state.
        budget: Bytes that kept states may have together, such as ``"64MiB"``; the state that the loop begins with is
            the caller's, and counts nothing.
        slots: How many states may be kept at a time, the first included, in place of a budget in bytes. With neither,
            so many that each step runs three times in all, at most: about the square root of twice the length.
        host: Where further states wait: a :class:`scrimp.store.Host`, or how many bytes of host memory to take.
        disk: Where states wait that host memory has no room for: a :class:`scrimp.store.Disk`.
        progress: Called after each step, forward and backward. It must not draw random numbers.

    Raises:
        LoopError: A step does what cannot be repeated.
        BudgetError: The budget has no room for a single state, or is missing where the length is not known.

    Example:
        >>> import torch, scrimp
        >>> cell, h0 = torch.nn.GRUCell(3, 8), torch.zeros(2, 8)
        >>> xs = torch.randn(1000, 2, 3)
        >>> def step(h, x):
        ...     h = cell(x, h)
        ...     return h, h.square().mean()
        >>> h, losses = scrimp.scan(step, h0, xs, slots=20)
        >>> losses.sum().backward()
    """
    _refuse_transforms()
    leaves, form = Form.of(state)
    check_leaves(leaves, "the state")
    slices, x_form = Form.of(xs) if xs is not None else ([], None)
    length = _length(slices, length, until)
    if host is not None and not isinstance(host, Store):
        host = Host(parse_budget(host))
    if disk is not None and not isinstance(disk, Store):
        raise StoreError(f"disk= needs a store that says where: scrimp.store.Disk(path, {disk!r}); have {disk!r}")
    stores = tuple(store for store in (host, disk) if store is not None)
    _check_limits(until if length is None else None, budget, slots, stores)
    function = Step(step, form, x_form)
    stacks = Stacks(None if until is not None else length)
    if not torch.is_grad_enabled():
        final, steps = _plainly(function, leaves, slices, length, until, stacks, Report(progress, length))
        return function.tree(final), _outputs(function, stacks.finished(), steps)
    depends_on = [one for one in (*leaves, *slices) if isinstance(one, Tensor) and one.requires_grad]
    bytes_for_states = None if budget is None else parse_budget(budget)
    keeper = Keeper(None if until is not None else length, length, slots, bytes_for_states, stores)
    tape = Tape(function, keeper, Report(progress, None if until is not None else length), depends_on)
    first = Frame.of(leaves)
    last = tape.forward(first, slices, length, until, stacks)
    outputs = stacks.finished()
    wanted = [one[-1] for one, want in zip(outputs, stacks.wants, strict=True) if want and one is not None]
    tape.last = seal([*last.leaves, *wanted])
    final, outputs = _attached(tape, leaves, slices, last, outputs, stacks.wants)
    return function.tree(final), _outputs(function, outputs, tape.length)


def _attached(
    tape: Tape, leaves: Sequence[Any], xs: Sequence[Tensor], last: Frame, outputs: list[Any], wants: Sequence[bool]
) -> tuple[list[Any], list[Any]]:
    """Give the results of a loop a place in autograd's graph, where they require grad."""
    if tape.length == 0:
        return list(leaves), outputs
    results: dict[int, int] = {}
    tensors: list[Tensor] = []
    places: list[int | None] = []
    for leaf, want in zip((*last.leaves, *outputs), (*last.wants, *wants), strict=True):
        if want and id(leaf) not in results:
            results[id(leaf)] = len(tensors)
            tensors.append(leaf)
        places.append(results[id(leaf)] if want else None)
    if not tensors:
        return last.leaves, outputs
    own = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    kept = tape.keeper.shelf.take(0)
    first = Frame(list(leaves), kept.wants, ())
    tape.keeper.shelf.first(replace(kept, leaves=[], versions=()))  # the node saves them, as it should
    attached = Loop.apply(tape, first, tensors, places, *tape.borders.values(), *own.values(), *xs)  # type: ignore[no-untyped-call]
    done = [
        leaf if place is None else attached[place] for leaf, place in zip((*last.leaves, *outputs), places, strict=True)
    ]
    return done[: len(leaves)], done[len(leaves) :]


def _refuse_transforms() -> None:
    """Raise where tensors would be differentiated in a way that the loop's node in the graph does not know."""
    if torch.is_grad_enabled() and transformed():
        raise LoopError(
            "transforms of torch.func and forward-mode derivatives cannot go through scan(), which keeps no graph of "
            "its steps. Use them within a step, or write the loop plainly; under torch.no_grad() scan() is a plain loop"
        )


def _plainly(
    step: Step,
    leaves: list[Any],
    xs: Sequence[Tensor],
    length: int | None,
    until: Callable[[Any], Any] | None,
    stacks: Stacks,
    report: Report,
) -> tuple[list[Any], int]:
    """Run the loop without gradients."""
    done, patience = 0, Patience()  # which is not entered: nothing here could be left half way
    while (length is None or done < length) and not (until is not None and bool(until(step.tree(leaves)))):
        ran = step.run(leaves, [one[done] for one in xs], patience)
        leaves = ran.state
        stacks.add(done, ran.output)
        done += 1
        report.forward(done, patience)
    return leaves, done


def _outputs(step: Step, stacked: list[Any], steps: int) -> Tree:
    return step.output_form.tree(stacked) if steps and step.output_form is not None else None


def _length(xs: Sequence[Any], length: int | None, until: object) -> int | None:
    if any(not isinstance(one, Tensor) or one.dim() == 0 for one in xs):
        raise LoopError("xs must hold tensors with a first dimension to go along; wrap numbers in torch.tensor")
    sizes = {len(one) for one in xs}
    if len(sizes) > 1:
        raise LoopError(f"the tensors of xs must have one length; have {sorted(sizes)}")
    if length is not None and (length < 0 or any(length > size for size in sizes)):
        raise LoopError(
            f"length must be 0 or more, and not over the {min(sizes, default=0)} slices of xs; have {length}"
        )
    if length is None and not sizes and until is None:
        raise LoopError("a loop without xs needs length=, or until= to end it")
    return length if length is not None else next(iter(sizes), None)


def _check_limits(endless: object, budget: Budget | None, slots: int | None, stores: tuple[Store, ...]) -> None:
    if budget is not None and slots is not None:
        raise BudgetError("give budget= in bytes or slots=, a number of states, and not both")
    if slots is not None and slots < 1:
        raise BudgetError(f"slots counts the first state too, so it is 1 or more; have {slots}", smallest=None)
    if endless is not None and budget is None and slots is None and not stores and torch.is_grad_enabled():
        raise BudgetError(
            "a loop whose length is not known needs a budget for its states: have neither of the two; give "
            'budget="64MiB", or slots=, or length= as the most steps that it may take'
        )
