"""Tracing: writing down what a training step does, as the data that plans are made from.

The mode that sees every operator stays on from the first operator of the forward pass to the end of backward, which
engine threads inherit. So it also sees a loss that is computed outside of the model, and backward's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from scrimp._ambient import Ambient
from scrimp._below import passed_on
from scrimp._compiler import explain, never_compiled
from scrimp._limiter import Limiter
from scrimp._meter import CAPTURED, Before, claim_workspaces, look_before, meter_for
from scrimp._record_mode import OurMode, replaying
from scrimp._scope import Control
from scrimp._step_recorder import StepHooks, StepRecorder
from scrimp._trace import Resident, Trace
from scrimp.errors import BudgetError, TraceError
from scrimp.policy import EveryN


class StepMode(OurMode):  # type: ignore[no-untyped-call]
    """Shows every operator of a step to its recorder."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.closed = False
        """It has seen its step, and only waits for a chance to leave."""

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if self.closed or self._recorder.failed:
            return passed_on(func, args, kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented
        try:
            return self._watched(func, args, kwargs)
        except BudgetError:
            self._recorder.fail()
            raise

    def _watched(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        recorder = self._recorder
        if replaying.active:
            return recorder.backward.replay(func, args, kwargs)
        if recorder.lost is not None:
            return recorder.look_on(func, args, kwargs)
        if torch._C._current_graph_task_id() != -1:
            return recorder.backward.run(func, args, kwargs)
        if recorder.draft.events and not recorder.inside:
            self.closed = recorder.draft.is_over  # an optimizer, say: no part of the step
            return passed_on(func, args, kwargs) if self.closed else recorder.backward.between(func, args, kwargs)
        return recorder.run(func, args, kwargs)


@final
class Tracing:
    """A step that is being recorded, and held under a budget if there is one, until it is told to leave."""

    def __init__(self, limiter: Limiter, before: Before) -> None:
        self.recorder = StepRecorder(limiter, before)
        self._mode = StepMode(self.recorder)
        self._hooks = StepHooks(self.recorder, limiter)
        self._ambient = Ambient(self._mode, (self._hooks.pack, self._hooks.unpack))

    @contextmanager
    def span(self, module: nn.Module | None = None) -> Iterator[None]:
        """Record what runs in the block as something that a plan can decide about."""
        ops = self.recorder.draft.ops
        first = len(ops)
        self.recorder.inside = True
        self._ambient.enter()
        try:
            with ExitStack() as stack:
                if not self._ambient.hooks_are_on:
                    stack.enter_context(saved_tensors_hooks(self._hooks.pack, self._hooks.unpack))
                stack.enter_context(module_paths(module, self.recorder))
                yield
            if self.recorder.lost is not None:
                self.recorder.fail()
                raise self.recorder.refusal()
        except BaseException as error:
            explain(error)
            raise
        finally:
            self.recorder.inside = False
        self.recorder.draft.spans.append((first, len(ops)))

    @property
    def failed(self) -> bool:
        """Whether the step did not fit into its budget."""
        return self.recorder.failed

    def finished(self) -> Trace:
        """Return the trace of what was recorded."""
        recorder = self.recorder
        found = Resident(CAPTURED, recorder.found_bytes)
        parts = (*recorder.before.parts, *((found,) if found.nbytes else ()))
        return recorder.draft.finished(recorder.limiter.meter, parts)

    def leave(self) -> None:
        """Stop recording, and forget every storage."""
        self._mode.closed = True
        self._ambient.leave()
        self.recorder.look_for_deaths()
        self.recorder.backward.abandon()
        self.recorder.close()


@contextmanager
def module_paths(module: nn.Module | None, recorder: StepRecorder) -> Iterator[None]:
    """Tell the recorder the path of the module that is running."""
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            stack.append(recorder.module)
            recorder.module = path

        return hook

    def leave(*_: object) -> None:
        recorder.module = stack.pop() if stack else ""

    with ExitStack() as hooks:
        for path, child in module.named_modules() if module is not None else ():
            if path and not isinstance(child, torch.jit.ScriptModule):
                hooks.callback(child.register_forward_pre_hook(enter(path)).remove)
                hooks.callback(child.register_forward_hook(leave, always_call=True).remove)
        try:
            yield
        finally:
            recorder.module = ""


def trace(fn: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Trace:
    """Run a training step and write down what it did.

    Run it in the state in which the planned steps begin: where they start without gradients, so must this.

    Args:
        fn: Computes the loss, a tensor of one element. It runs once, and backward follows. The default random
            generators, and the gradients and buffers of a module, are put back afterwards.
        *args: Passed on to it.
        **kwargs: Passed on to it.

    Returns:
        The trace, for :func:`scrimp.plan`. On a GPU, times are the device's and an operator's inner memory is that of
        PyTorch's allocator; on the CPU times are the host's, and inner memory is not seen.

    Raises:
        TraceError: when the step gives no loss to go backward from, or its tensors have no data; see
            :func:`scrimp.trace_on` for those.

    >>> import torch, scrimp
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.randn(128, 64)
    >>> seen = scrimp.trace(lambda: model(x).square().mean())
    >>> plan = scrimp.plan(seen, "200 kB")
    >>> with scrimp.session(policy=scrimp.policy.Planned(seen, plan)):
    ...     loss = model(x).square().mean()
    >>> loss.backward()
    """
    if is_described(fn) or is_described((args, kwargs)):
        raise TraceError(
            "need tensors with data to run a step, have some on the meta device or fake ones: "
            'scrimp.trace_on("H200", ...) follows a step without running it'
        )
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    module = module if isinstance(module, nn.Module) else None
    device = device_of(module, (args, kwargs))
    devices = [device] if device.type == "cuda" else []
    claim_workspaces(device)
    with _put_back(module), torch.random.fork_rng(devices=devices):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = look_before(device, [module] if module is not None else [], inputs)
        limiter = Limiter(Control(EveryN(1), verify=False), meter_for(device, 0), budget=None)
        tracing = Tracing(limiter, before)
        try:
            dismantle(_step(tracing, module, lambda: fn(*args, **kwargs)))
        finally:
            tracing.leave()
        return tracing.finished()


def _step(tracing: Tracing, module: nn.Module | None, forward: Callable[[], Tensor]) -> list[Node]:
    with tracing.span(module):
        loss = forward()
    return go_backward(loss, tracing.recorder)


def is_described(tree: object) -> bool:
    """Tell whether a module's parameters, or the tensors of a tree, are there as descriptions only."""
    tensors = tree.parameters() if isinstance(tree, nn.Module) else tree_leaves(tree)
    return any(isinstance(one, FakeTensor) or (isinstance(one, Tensor) and one.is_meta) for one in tensors)


def device_of(module: nn.Module | None, tree: object) -> torch.device:
    """Return the device that a step runs on: that of the first parameter or input on a GPU, or the CPU.

    Where there are neither, as in a function that has all it needs by closure, it is the current GPU if there is one.
    """
    leaves = [*(module.parameters() if module is not None else ()), *tree_leaves(tree)]
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    on_gpu = [device for device in devices if device.type == "cuda"]
    if devices:
        return on_gpu[0] if on_gpu else torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def go_backward(loss: Tensor | None, recorder: StepRecorder) -> list[Node]:
    """Run backward under the recorder, from what must be a loss; returns the graph, to :func:`dismantle`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TraceError(
            f"need a loss, a tensor of one element that requires grad, to go backward from; have {loss!r:.80}"
        )
    recorder.look_for_deaths()
    torch.autograd.backward(loss)
    recorder.backward.close("")
    return _nodes(loss.grad_fn)


def _nodes(root: Node | None) -> list[Node]:
    """All nodes of a graph, each after those that lead to it."""
    found: set[Node] = set()
    pending = [root] if root is not None else []
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
    # Nodes count up as forward makes them; those that accumulate gradients have the highest number, and are leaves.
    return sorted(found, key=lambda node: node._sequence_nr() if node.next_functions else -1, reverse=True)


def dismantle(nodes: list[Node]) -> None:
    """Free a graph whose root nobody else holds, node by node.

    A node that Python has looked at, as recording backward does, frees what follows it from within its own destructor:
    left to itself, a graph of some ten thousand nodes in a row overflows the stack.
    """
    nodes.reverse()
    while nodes:
        nodes.pop()


@contextmanager
def _put_back(module: nn.Module | None) -> Iterator[None]:
    """Leave a module's buffers and gradients as they were."""
    if module is None:
        yield
        return
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
