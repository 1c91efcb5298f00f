"""Independent branches, run at the same time: threads on the CPU, streams on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from scrimp._engine.cost import Memory, Trial, shape_key
from scrimp._engine.fork_join import Branch, Gated, gated, join, trace_branch
from scrimp._engine.streams import AUTO_STREAMS, run_on_streams
from scrimp._engine.workers import Workers, can_be_threaded, crew_of, intra_op_threads, run_tasks
from scrimp.errors import BranchError, StackableBranchesWarning

_trials = Memory(Trial)


def parallel(
    branches: Sequence[Callable[..., Any]],
    *inputs: Any,
    workers: Workers = "auto",
    threads_per_worker: int | None = None,
) -> list[Any]:
    """Run ``[branch(*inputs) for branch in branches]`` at the same time, forward and backward.

    On the CPU the branches run in threads, and appear as one node in the graph; gradients are
    bit-identical to those of the serial line, with the same number of threads inside operators. On a GPU
    each branch gets a stream.

    Branches must be independent: they write to nothing that another reads, draw no random numbers from
    the default generator, and get every tensor that has a history through ``inputs`` (parameters may
    come from anywhere). Where branches could not be run apart without changing what they do, they run
    one after the other, plainly: under dispatch or function modes, saved-tensor hooks, ``torch.func``
    transforms, ``torch.compile`` and anomaly mode.

    Args:
        branches: Functions of ``inputs``, for instance modules; each returns a tensor or a nest of tensors.
        inputs: Tensors, or nests of these, or anything else.
        workers: How many threads, or streams. ``"auto"``: four streams; on the CPU one after the other at first,
            in threads where the measured times promise a gain, and then whichever was faster. Branches that
            draw random numbers stay serial. The choice does not change the result.
        threads_per_worker: How many threads an operator may use; as many as now, if not given.
            ``workers`` times this should not exceed the number of cores.

    Returns:
        The branches' results, in their sequence.

    Raises:
        BranchError: The branches are not independent.

    Warns:
        StackableBranchesWarning: With ``"auto"``, once for these branches: they are modules of one shape, which
            could be stacked instead.

    Example:
        >>> import torch, scrimp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> double, square = scrimp.parallel([lambda x: 2 * x, lambda x: x * x], x, workers=2)
        >>> (double + square).sum().backward()
        >>> x.grad
        tensor([4., 6.])
    """
    if workers == "auto":
        _suggest_stacking(branches)
    if any(isinstance(value, Tensor) and value.is_cuda for value in tree_flatten(inputs)[0]):
        return run_on_streams(branches, inputs, AUTO_STREAMS if workers == "auto" else crew_of(workers, 1))
    threads = threads_per_worker or torch.get_num_threads()
    crew = crew_of(workers, threads)
    if min(crew, len(branches)) < 2 or not can_be_threaded():
        with intra_op_threads(threads):
            return [branch(*inputs) for branch in branches]
    if workers != "auto":
        return _run_in_threads(branches, inputs, crew, threads)
    trial = _trials.entry((shape_key(branches, inputs, threads), crew))
    if trial.threaded(crew):
        with trial.timed():
            return _run_in_threads(branches, inputs, crew, threads)
    if trial.is_settled(crew):
        with intra_op_threads(threads):
            return [branch(*inputs) for branch in branches]
    randomness = torch.get_rng_state()
    with intra_op_threads(threads):
        results = trial.timed_one_by_one([partial(branch, *inputs) for branch in branches])
    if not torch.equal(randomness, torch.get_rng_state()):
        trial.stay_serial()
    return results


_STACK_INSTEAD = (
    "scrimp.parallel was given modules of one type with parameters of the same shapes. Next: stack "
    "them, with torch.func.stack_module_state and torch.vmap: one batched operator beats threads. "
    "(Pass a number as workers to run them in threads all the same.)"
)


class _Looked:
    """Whether these branches were looked at."""

    def __init__(self) -> None:
        self.already = False


_looked = Memory(_Looked)


def _suggest_stacking(branches: Sequence[Callable[..., Any]]) -> None:
    """Warn, once for these branches, when they could be stacked, however many cores there are."""
    modules = [branch for branch in branches if isinstance(branch, nn.Module)]
    if len(modules) < max(2, len(branches)) or torch.compiler.is_compiling():
        return
    looked = _looked.entry(tuple(map(id, modules)))
    if not looked.already:
        looked.already = True
        if _stackable(modules):
            warnings.warn(_STACK_INSTEAD, StackableBranchesWarning, stacklevel=3)


def _stackable(modules: Sequence[nn.Module]) -> bool:
    """Whether the modules print alike, have parameters and buffers of the same shapes, and share none of these."""
    tensors = [dict((*module.named_parameters(), *module.named_buffers())) for module in modules]
    flat = [tensor for of_module in tensors for tensor in of_module.values()]
    if len(set(map(id, flat))) < len(flat) or any(is_lazy(tensor) for tensor in flat):
        return False
    forms = {
        (type(module), repr(module), tuple((name, value.shape, value.dtype) for name, value in of_module.items()))
        for module, of_module in zip(modules, tensors, strict=True)
    }
    return len(forms) == 1


def _run_in_threads(
    branches: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], workers: int, threads: int
) -> list[Any]:
    flat, layout = tree_flatten(inputs)
    randomness = torch.get_rng_state()
    results = run_tasks(
        [partial(_run_branch, index, branch, flat, layout) for index, branch in enumerate(branches)],
        workers,
        threads,
    )
    if not torch.equal(randomness, torch.get_rng_state()):
        torch.set_rng_state(randomness)
        raise BranchError(
            "branches that run at the same time need to leave the default random generator alone, and "
            "one (or another thread of this program) drew from it, so who got which number was chance. "
            "Next: give each branch a generator of its own, or pass workers=1."
        )

    def runner(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        return _run_backward(tasks, workers, threads)

    graphs = [result.branch for result in results]
    joined = join([result.differentiable for result in results], graphs, runner)
    return [result.rebuilt(outer) for result, outer in zip(results, joined, strict=True)]


def _run_backward(tasks: Sequence[Callable[[], Any]], workers: int, threads: int) -> list[Any]:
    if not can_be_threaded():
        with intra_op_threads(threads):
            return [task() for task in tasks]
    # Checkpoints inside the branches set and restore the generator's state, here several at once.
    randomness = torch.get_rng_state()
    try:
        return run_tasks(tasks, workers, threads)
    finally:
        torch.set_rng_state(randomness)


@dataclass(frozen=True, slots=True)
class _Result:
    """What a branch returned, and the graph behind it."""

    flat: list[Any]
    layout: TreeSpec
    differentiable: list[Tensor]
    branch: Branch

    def rebuilt(self, joined: Sequence[Tensor]) -> Any:
        """The branch's outputs, with the joining node's in place of those that have a graph."""
        outer = {id(inner): value for inner, value in zip(self.differentiable, joined, strict=True)}
        return tree_unflatten([outer.get(id(value), value) for value in self.flat], self.layout)


def _run_branch(index: int, branch: Callable[..., Any], flat: Sequence[Any], layout: TreeSpec) -> _Result:
    """Run one branch, in whatever thread this is, on inputs behind gates."""
    gates = {}
    if torch.is_grad_enabled():
        gates = {id(value): gated(value) for value in flat if isinstance(value, Tensor) and value.requires_grad}
    given = [gates[id(value)].inside if id(value) in gates else value for value in flat]
    returned, out_layout = tree_flatten(branch(*tree_unflatten(given, layout)))
    for gate in gates.values():
        _refuse_changed(index, gate)
    # An input that is returned as it came is the outer tensor itself, as it would be without branches.
    untouched = {id(gate.inside): gate.outside for gate in gates.values()}
    returned = [untouched.get(id(value), value) for value in returned]
    outside = {id(value) for value in flat}
    made = {
        id(value): value
        for value in returned
        if isinstance(value, Tensor) and value.grad_fn is not None and id(value) not in outside
    }
    differentiable = list(made.values())
    return _Result(returned, out_layout, differentiable, trace_branch(differentiable, list(gates.values())))


def _refuse_changed(index: int, gate: Gated) -> None:
    if gate.inside._backward_hooks:
        raise BranchError(
            f"branch {index} needs to leave its inputs as they are, and registered a hook on one, which "
            "would see only this branch's part of the gradient. Next: register it on the tensor before "
            "scrimp.parallel."
        )
