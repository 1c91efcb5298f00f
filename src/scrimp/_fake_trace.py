"""Traces of steps that never run: shapes from the ``meta`` device, times from a machine's roofline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from scrimp._limiter import Limiter
from scrimp._live import rounded
from scrimp._machine import Machine
from scrimp._machine import machine as machine_named
from scrimp._meter import Before
from scrimp._roofline import META, Clock, FusedKernels, MachineMeter
from scrimp._scope import Control
from scrimp._step_recorder import StepHooks, StepRecorder
from scrimp._trace import Resident, Trace
from scrimp._tracing import StepMode, dismantle, go_backward, module_paths
from scrimp.errors import TraceError, TraceWarning
from scrimp.policy import EveryN, KeepAll

_UNFOLLOWED = (
    "need a step that can be followed without data, have one that fails on the meta device: shapes that depend on "
    "data, a tensor read by Python, or an operator that has no shape rule. Trace a real step instead (scrimp.trace). "
    "The error: {}"
)
_ANSWERED = (
    "the step asks its data {} yes-or-no questions (is every token valid?); there is no data, and the answer was taken "
    "to be yes"
)


def trace_on(on: str | Machine, fn: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Trace:
    """Write down what a training step would do on a machine that is not here, without running or allocating anything.

    Args:
        on: the machine, or its name; see ``scrimp.planning.MACHINES``.
        fn: Computes the loss: best a module. What it has of parameters, buffers and arguments may be real, on the
            ``meta`` device, or fake (``FakeTensorMode``); only shapes, dtypes and strides are looked at.
        *args: Passed on to it.
        **kwargs: Passed on to it.

    Returns:
        The trace, for :func:`scrimp.plan`. Times are estimates, good for comparing plans; what an operator uses within
        itself is not seen. A yes-or-no question that Python asks of data is taken to be answered yes, with a
        :class:`scrimp.errors.TraceWarning`.

    Raises:
        TraceError: when the step's shapes depend on its data, or it gives no loss to go backward from.

    >>> import torch, scrimp
    >>> class Model(torch.nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x).square().mean()
    >>> with torch.device("meta"):
    ...     model = Model(torch.nn.Linear(4096, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 4096))
    ...     x = torch.empty(1 << 20, 4096)
    >>> seen = scrimp.trace_on("H200", model, x)
    >>> print(scrimp.plan(seen, "100 GiB"))  # doctest: +ELLIPSIS
    peak ... GiB of 100.00 GiB, time +...
    """
    machine = machine_named(on) if isinstance(on, str) else on
    try:
        followed = follow(machine, fn, args, kwargs, budget=None)
    except (NotImplementedError, RuntimeError) as error:
        raise TraceError(_UNFOLLOWED.format(error)) from error
    if followed.answered:
        warnings.warn(_ANSWERED.format(followed.answered), TraceWarning, stacklevel=2)
    return followed.trace


@dataclass(frozen=True, slots=True)
class Followed:
    """A step that was followed on descriptions of tensors.

    Attributes:
        trace: what it would do.
        answered: how many yes-or-no questions about data were answered with yes.
    """

    trace: Trace
    answered: int


def follow(
    machine: Machine,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget: int | None,
    loss_of: Callable[[Any], Tensor] = lambda loss: loss,
    kernels: type[TorchFunctionMode] = FusedKernels,
) -> Followed:
    """Follow a step without running it.

    Args:
        machine: where.
        fn: computes what ``loss_of`` makes a loss of.
        args: passed on to it, as descriptions.
        kwargs: passed on to it, as descriptions.
        budget: bytes for what the step makes, beyond what is there before; None for no limit.
        loss_of: makes a loss of what ``fn`` returns.
        kernels: says which kernels the machine has.
    """
    args, kwargs = tree_map(described, (tuple(args), dict(kwargs)))
    step, parameters, buffers = _described_step(fn)
    parts = {"parameters": parameters, "buffers": buffers, "inputs": tree_leaves((args, kwargs))}
    meter = MachineMeter(machine)
    clock = Clock(meter)
    policy = EveryN(1) if budget is None else KeepAll()
    recorder = StepRecorder(Limiter(Control(policy, verify=False), meter, budget), Before((), frozenset()))
    try:
        with clock:
            module = fn if isinstance(fn, nn.Module) else None
            dismantle(_record(recorder, module, lambda: loss_of(step(*args, **kwargs)), kernels()))
    finally:
        recorder.close()
    trace = recorder.draft.finished(meter, _resident(parts, machine))
    return Followed(replace(trace, out_bandwidth=machine.link, in_bandwidth=machine.link), clock.answered)


def _record(
    recorder: StepRecorder, module: nn.Module | None, step: Callable[[], Tensor], kernels: TorchFunctionMode
) -> list[Node]:
    hooks, mode = StepHooks(recorder, recorder.limiter), StepMode(recorder)
    with mode:
        recorder.inside = True
        with saved_tensors_hooks(hooks.pack, hooks.unpack), kernels, META, module_paths(module, recorder):
            loss = step()
        recorder.inside = False
        recorder.draft.spans.append((0, len(recorder.draft.ops)))
        return go_backward(loss, recorder)


# -- descriptions --


def described(leaf: Any) -> Any:
    """Return a description of a tensor, or of a device; anything else as it is."""
    if isinstance(leaf, torch.device):
        return META
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
    return made.requires_grad_(leaf.requires_grad)


def _described_step(fn: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """Return the step over descriptions of a module's tensors, and these; a tied tensor is described once."""
    if not isinstance(fn, nn.Module):
        return fn, [], []
    known: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        return known.setdefault(id(tensor), described(tensor))

    parameters = {name: once(tensor) for name, tensor in fn.named_parameters(remove_duplicate=False)}
    buffers = {name: once(tensor) for name, tensor in fn.named_buffers(remove_duplicate=False)}

    def step(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(fn, parameters | buffers, args, kwargs)
        return result

    return step, list(parameters.values()), list(buffers.values())


def _resident(parts: Mapping[str, Sequence[Any]], on: Machine) -> tuple[Resident, ...]:
    found = []
    for name, tensors in parts.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        found.append(Resident(name, sum(rounded(nbytes, on.block) for nbytes in storages.values())))
    return tuple(part for part in found if part.nbytes)
