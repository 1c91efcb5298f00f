"""The backward pass: PyTorch's own engine, with orders, observers, leaf reports and errors around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from scrimp._engine.diagnose import failing_node, refuse_arguments, translated
from scrimp._engine.graph import Graph, Root, describe, record_graph
from scrimp._engine.leaves import LeafCallback, reported_leaves
from scrimp._engine.observe import Observer, Watch
from scrimp._engine.order import Order, imposed, plan_order
from scrimp._engine.threaded import run_pass
from scrimp._engine.workers import Workers, crew_of
from scrimp.errors import BackwardCancelledError

# Taken at import: somebody may replace torch.autograd.backward by the function below.
_torch_backward: Callable[..., None] = torch.autograd.backward


def backward(
    root: Root | Sequence[Root],
    gradient: Tensor | Sequence[Tensor | None] | None = None,
    *,
    inputs: Root | Sequence[Root] | dict[str, Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    order: Order = "torch",
    workers: Workers | None = None,
    observer: Observer | Sequence[Observer] | None = None,
    on_leaf_grad_ready: LeafCallback | None = None,
) -> None:
    """Accumulate the gradients of ``root`` into the leaves, as ``root.backward()`` does.

    PyTorch's engine runs the nodes, so hooks, checkpoints, anomaly mode and freeing are PyTorch's own. With
    ``order="torch"`` gradients are bit-identical to ``root.backward()``; in another order a tensor that
    receives three or more gradients may sum them in another sequence. Each order is the same in every run.

    Args:
        root: One tensor or gradient edge, or several.
        gradient: The gradient of each root; a root of one real element needs none.
        inputs: Accumulate into these only.
        retain_graph: Keep what the forward saved, for another pass. Default: the value of ``create_graph``.
        create_graph: Record the pass itself, for higher derivatives.
        order: In which order nodes that are ready run: ``"torch"`` (the latest forward operator first),
            ``"depth-first"`` (finish a branch before beginning the next), ``"memory"`` (free the most first,
            where that lowers the predicted peak by a tenth), or a function of a node: the highest value
            first. Where a node's order cannot be set (custom Functions in some PyTorch versions) it is
            ``"torch"``.
        workers: In how many threads branches that are independent of each other may run, on the CPU; ``"auto"``:
            as many as there are cores for, where this was measured to be faster. The first pass over a graph of
            a new shape measures its nodes; what cannot be cut without changing what it does is run by PyTorch's
            engine in one piece: see the documentation. Has no effect on the gradients' bits, and none together
            with another ``order``, ``inputs``, ``create_graph``, ``observer`` or ``on_leaf_grad_ready``.
        observer: Watches the pass; see :class:`Profile`, :class:`ProgressBar` and :class:`Cancellation`.
        on_leaf_grad_ready: Called as ``on_leaf_grad_ready(leaf, leaf.grad)``, once for every leaf that
            received a gradient, as soon as nothing more can arrive in this pass. It may step an optimizer and
            set ``leaf.grad`` to ``None``. Where the graph contains reentrant checkpoints, leaves are reported
            after the last of these.

    Raises:
        GradientMismatchError: A gradient does not fit its root, or a custom Function returned wrong ones.
        GraphFreedError: The graph was freed by an earlier pass.
        BackwardCancelledError: A :class:`Cancellation` among the observers stopped the pass.
        LateGradientError: A nested backward added to a leaf that had been reported.

    Example:
        >>> import torch, scrimp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> scrimp.backward((x * x).sum(), order="depth-first")
        >>> x.grad
        tensor([2., 4.])
    """
    roots, gradients = _as_pairs(root, gradient)
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    elif inputs is not None and not isinstance(inputs, Tensor | GradientEdge):
        inputs = tuple(inputs)
    refuse_arguments(roots, gradients)
    observers = _as_observers(observer)
    if workers is not None:
        crew_of(workers, 1)  # other workers are refused wherever they would have no effect, too
    watch: Watch | None = None
    try:
        with ExitStack() as stack:
            if order != "torch" or observers or on_leaf_grad_ready or torch.is_anomaly_enabled():
                graph = record_graph(roots)
                watch = _prepare(stack, graph, order, observers, on_leaf_grad_ready)
                workers = None
            if workers is None or inputs is not None or create_graph:
                _torch_backward(roots, gradients, retain_graph, create_graph, inputs=inputs)
            else:
                run_pass(partial(_plain_pass, retain_graph), roots, gradients, workers)
    except BackwardCancelledError as error:
        raise _with_state(error, watch) from None
    except RuntimeError as error:
        ours = translated(error, roots, gradients, watch.running if watch else None)
        if ours is not None:
            try:
                raise ours from error
            finally:
                del ours  # or this frame and the error's traceback would keep each other, and the graph, alive
        _add_note(error, watch)
        raise
    except Exception as error:
        _add_note(error, watch)
        raise


def _plain_pass(
    retain_graph: bool | None,
    roots: Sequence[Root],
    gradients: Sequence[Tensor | None],
) -> None:
    _torch_backward(roots, gradients, retain_graph)


_KINDS = {"root": "a tensor", "gradient": "a tensor", "observer": "a scrimp.Observer"}


def _as_pairs(
    root: Root | Sequence[Root], gradient: Tensor | Sequence[Tensor | None] | None
) -> tuple[tuple[Root, ...], tuple[Tensor | None, ...]]:
    roots: tuple[Root, ...] = (root,) if isinstance(root, Tensor | GradientEdge) else _as_tuple("root", root)
    if gradient is None:
        return roots, (None,) * len(roots)
    return roots, (gradient,) if isinstance(gradient, Tensor) else _as_tuple("gradient", gradient)


def _as_tuple(name: str, several: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(several, Iterable):
        return tuple(several)
    raise TypeError(
        f"{name} needs to be {_KINDS[name]} or a sequence of these, and is {several!r}. Next: pass one of these."
    )


def _as_observers(observer: Observer | Sequence[Observer] | None) -> tuple[Observer, ...]:
    if observer is None:
        return ()
    several = (observer,) if isinstance(observer, Observer) else _as_tuple("observer", observer)
    for one in several:
        if not isinstance(one, Observer):
            raise TypeError(f"observer needs to be a scrimp.Observer, and is {one!r}. Next: pass an instance of one.")
    return several


def _prepare(
    stack: ExitStack,
    graph: Graph,
    order: Order,
    observers: tuple[Observer, ...],
    on_leaf_grad_ready: LeafCallback | None,
) -> Watch | None:
    """Enter, in this sequence, what was asked for: later hooks see what earlier ones did."""
    stack.enter_context(imposed(plan_order(graph, order)))
    if on_leaf_grad_ready is not None:
        stack.enter_context(reported_leaves(graph, on_leaf_grad_ready))
    if observers or torch.is_anomaly_enabled():
        return stack.enter_context(Watch(list(graph), observers))
    return None


def _with_state(error: BackwardCancelledError, watch: Watch | None) -> BackwardCancelledError:
    """The error with the condition in which graph and gradients were left."""
    if watch is None:  # a hook of the user's raised it
        return error
    return BackwardCancelledError(
        f"{error}: {watch.nodes_done} nodes ran and {len(watch.leaves_done)} leaves have their gradient; the "
        "others are untouched. Next: clear the gradients, then run forward and backward again (only "
        "backward, if the graph was retained).",
        nodes_done=watch.nodes_done,
        leaves_done=tuple(watch.leaves_done),
    )


def _add_note(error: Exception, watch: Watch | None) -> None:
    """Say in which node somebody else's error was raised, when that is known."""
    node = failing_node(error, watch.running if watch else None)
    if node is not None:
        error.add_note(f"raised in the backward pass, in {describe(node)}")
