"""Traces of steps that never run: shapes from the ``meta`` device, times from a machine's roofline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from scrimp._answers import Answers
from scrimp._limiter import Limiter
from scrimp._live import rounded
from scrimp._machine import Machine
from scrimp._machine import machine as machine_named
from scrimp._meter import Before
from scrimp._record import tensors_in
from scrimp._roofline import META, Clock, EndlessError, FusedKernels, MachineMeter
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
        answered: how many questions about data were answered without knowing: yes, where nothing else is said.
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
    answers: Answers | None = None,
    with_gradients: Set[int] = frozenset(),
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
        answers: what the same step was answered where it had data, as far as that is known; where it is not, the
            smallest answer is taken.
        with_gradients: the ids of the parameters that have gradients already.
    """
    args, kwargs = tree_map(described, (tuple(args), dict(kwargs)))
    around, parameters, buffers = _described_module(fn, with_gradients)
    parts = {"parameters": parameters, "buffers": buffers, "inputs": tree_leaves((args, kwargs))}
    meter = MachineMeter(machine)
    clock = Clock(meter, answers)
    policy = EveryN(1) if budget is None else KeepAll()
    recorder = StepRecorder(Limiter(Control(policy, verify=False), meter, budget), Before((), frozenset()))
    try:
        with clock:
            module = fn if isinstance(fn, nn.Module) else None
            around(lambda: dismantle(_record(recorder, module, lambda: loss_of(fn(*args, **kwargs)), kernels())))
    finally:
        recorder.close()
    trace = recorder.draft.finished(meter, _resident(parts, machine))
    return Followed(replace(trace, out_bandwidth=machine.link, in_bandwidth=machine.link), clock.answered)


def forward_alone(
    machine: Machine,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kernels: type[TorchFunctionMode],
    answers: Answers,
) -> int:
    """Return the most bytes that a forward pass makes and needs at once, if nothing is kept for backward.

    It is followed for as long as its questions about data can be answered, or guessed at: all with yes, or all with no.
    """
    ways = (_forward_alone(machine, module, args, kwargs, kernels, answers, guess) for guess in (True, False))
    return min(ways)


def _forward_alone(
    machine: Machine,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kernels: type[TorchFunctionMode],
    answers: Answers,
    guess: bool,
) -> int:
    meter = MachineMeter(machine)
    around, _, _ = _described_module(module, frozenset())

    def forward() -> None:
        with _Counted(meter), kernels(), META, saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            module(*args, **kwargs)

    with Clock(meter, answers, guess), suppress(EndlessError):
        around(forward)
    return meter.most()


@final
class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators make."""

    def __init__(self, meter: MachineMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        older = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, *kwargs.values()])}
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in older:
                self._meter.made(tensor.untyped_storage())
        return result


def _record(
    recorder: StepRecorder, module: nn.Module | None, step: Callable[[], Tensor], kernels: TorchFunctionMode
) -> list[Node]:
    hooks, mode = StepHooks(recorder, recorder.limiter), StepMode(recorder)
    with mode, kernels, META:  # in backward, too: a checkpoint of PyTorch's runs forward code there
        recorder.inside = True
        with saved_tensors_hooks(hooks.pack, hooks.unpack), module_paths(module, recorder):
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


@final
class _Around(nn.Module):
    """Runs any code as if it were the forward pass of a module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, code: Callable[[], None]) -> None:
        """Run it."""
        code()


_Run = Callable[[Callable[[], None]], None]


def _described_module(fn: Callable[..., Tensor], with_gradients: Set[int]) -> tuple[_Run, list[Tensor], list[Tensor]]:
    """Return what runs code while a module's tensors are descriptions, and these; a tied tensor is described once."""
    if not isinstance(fn, nn.Module):
        return (lambda code: code()), [], []
    known: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = described(tensor)
            if id(tensor) in with_gradients:
                known[id(tensor)].grad = described(tensor.detach())
        return known[id(tensor)]

    parameters = {name: once(tensor) for name, tensor in fn.named_parameters(remove_duplicate=False)}
    buffers = {name: once(tensor) for name, tensor in fn.named_buffers(remove_duplicate=False)}
    given = {f"inner.{name}": tensor for name, tensor in (parameters | buffers).items()}

    def run(code: Callable[[], None]) -> None:
        torch.func.functional_call(_Around(fn), given, (code,))

    return run, list(parameters.values()), list(buffers.values())


def _resident(parts: Mapping[str, Sequence[Any]], on: Machine) -> tuple[Resident, ...]:
    found = []
    for name, tensors in parts.items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
        found.append(Resident(name, sum(rounded(nbytes, on.block) for nbytes in storages.values())))
    return tuple(part for part in found if part.nbytes)
