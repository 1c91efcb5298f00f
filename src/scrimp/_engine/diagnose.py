"""Turning PyTorch's errors of a backward pass into ones that name the node, the shapes and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from scrimp._engine.graph import Root, describe, node_of, record_graph, shape_text
from scrimp.errors import BackwardError, GradientMismatchError, GraphFreedError

Gradients = Sequence[Tensor | None]

_FREED = re.compile(r"backward through the graph a second time")
_WRONG_RESULT = re.compile(r"[Ff]unction (\w+) returned an (incorrect number of gradients|invalid gradient)")
_NO_TENSOR = re.compile(r"expected Variable or None \(got ")


def refuse_arguments(roots: Sequence[Root], gradients: Gradients) -> None:
    """Raise where PyTorch would be silent: at a gradient that it would round, and at one that it would not use."""
    if len(gradients) > len(roots):
        raise GradientMismatchError(_other_count(roots, gradients))
    for index, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
        if not isinstance(gradient, Tensor):
            continue
        dtype = root.dtype if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr].dtype
        if gradient.dtype != dtype and not _takes_any_dtype(root):
            raise GradientMismatchError(
                f"gradient {index} needs dtype {dtype}, as {_name(root, index)} has, and has "
                f"{gradient.dtype}. Next: convert it where you can see it, with gradient.to({dtype})."
            )


def _takes_any_dtype(root: Root) -> bool:
    return isinstance(root, Tensor) and root.is_leaf and root.requires_grad and root.grad_dtype != root.dtype


def diagnose_arguments(roots: Sequence[Root], gradients: Gradients) -> str | None:
    """Say what is wrong with the arguments of a pass that PyTorch refused; ``None`` when nothing is."""
    if len(roots) != len(gradients):
        return _other_count(roots, gradients)
    for index, (root, gradient) in enumerate(zip(roots, gradients, strict=True)):
        problem = _diagnose_pair(index, root, gradient)
        if problem is not None:
            return problem
    return None


def _other_count(roots: Sequence[Root], gradients: Gradients) -> str:
    return (
        f"backward needs one gradient for each root (or none at all), and has {len(gradients)} for "
        f"{len(roots)} roots. Next: pass a sequence with None for each scalar root."
    )


def _diagnose_pair(index: int, root: Root, gradient: Tensor | None) -> str | None:
    if _is_nested(root):
        return None
    shape, dtype, device = _metadata(root)
    name = _name(root, index)
    if node_of(root) is None:
        return (
            f"{name} needs to require grad, and neither does it nor was it made from a tensor that does. "
            "Next: call requires_grad_() on an input before the forward pass, and look for torch.no_grad() "
            "or .detach() on the way."
        )
    if gradient is None:
        if shape.numel() == 1 and dtype.is_floating_point:
            return None
        return (
            f"{name} needs a gradient, because only a real tensor of one element has an obvious one, and has "
            f"none: its shape is {tuple(shape)}, its dtype {dtype}. Next: pass gradient=, of this shape and "
            "dtype, or reduce it to a scalar loss first."
        )
    if gradient.is_nested:
        return None
    if gradient.shape != shape:
        return (
            f"gradient {index} needs shape {tuple(shape)}, as {name} has, and has {tuple(gradient.shape)}. "
            "Next: reshape or expand it."
        )
    if gradient.device != device:
        return (
            f"gradient {index} needs to be on {device}, as {name} is, and is on {gradient.device}. "
            f"Next: move it with gradient.to({str(device)!r})."
        )
    return None


def _is_nested(root: Root) -> bool:
    if isinstance(root, Tensor):
        return root.is_nested
    return bool(root.node._input_metadata[root.output_nr].is_nested_tensor)


def _metadata(root: Root) -> tuple[Any, Any, Any]:
    if isinstance(root, Tensor):
        return root.shape, root.dtype, root.device
    metadata = root.node._input_metadata[root.output_nr]
    return torch.Size(metadata.shape), metadata.dtype, metadata.device


def _name(root: Root, index: int) -> str:
    node = node_of(root)
    return f"root {index}" if node is None else f"root {index}, the output of {describe(node)},"


def translated(
    error: RuntimeError, roots: Sequence[Root], gradients: Gradients, running: Node | None
) -> BackwardError | None:
    """Our error for one that PyTorch raised, or ``None`` where the original says more than we could."""
    said = f"\nPyTorch said: {error}"
    problem = diagnose_arguments(roots, gradients)
    if problem is not None:
        return GradientMismatchError(problem + said)
    if _FREED.search(str(error)):
        return GraphFreedError(_diagnose_freed(roots, running) + said)
    wrong = _WRONG_RESULT.search(str(error))
    if wrong is not None:
        return GradientMismatchError(_diagnose_result(wrong[1], roots, running) + said)
    if _NO_TENSOR.search(str(error)):
        return GradientMismatchError(_diagnose_result(None, roots, running) + said)
    return None


def _diagnose_freed(roots: Sequence[Root], running: Node | None) -> str:
    freed = [running] if running is not None else [node for node in record_graph(roots) if _is_freed(node)]
    names = "; ".join(describe(node) for node in freed[:3])
    more = f" and {len(freed) - 3} more" if len(freed) > 3 else ""
    return (
        "backward needs the tensors that the forward pass saved, and they are freed at "
        f"{names or 'a node'}{more}. Next: give retain_graph=True to the pass before this one, or run the "
        "forward pass again."
    )


def _is_freed(node: Node) -> bool:
    """Whether ``node`` had saved tensors that are gone. Nothing is unpacked to find out."""
    for name in dir(type(node)):
        if name.startswith("_raw_saved"):
            try:
                saved = getattr(node, name)
            except RuntimeError:
                return True
            several = saved if isinstance(saved, tuple) else (saved,)
            if any(getattr(one, "data", one) is None for one in several) and _refuses(node, name):
                return True
    return False


def _refuses(node: Node, raw_name: str) -> bool:
    """Whether ``node`` says of what it does not hold that it is freed, and not that it never needed it."""
    try:
        getattr(node, raw_name.replace("_raw_saved", "_saved"))
    except RuntimeError:
        return True
    return False


def _diagnose_result(name: str | None, roots: Sequence[Root], running: Node | None) -> str:
    """Say what a custom Function had to return; PyTorch does not always tell its name."""
    candidates = [running] if running is not None else [n for n in record_graph(roots) if _may_be(n, name)]
    if not candidates:  # the node is in a graph that a nested backward made
        return (
            f"{name or 'a custom Function'} needs to return one gradient for each input, of the input's shape, and "
            "does not. Next: return a tensor for every input that requires grad, and None for the others."
        )
    node = candidates[0]
    wanted = ", ".join(
        "any" if following is None else shape_text(following, slot) for following, slot in node.next_functions
    )
    others = "of its name" if name else "that are custom Functions"
    which = "" if len(candidates) == 1 else f" (or one of {len(candidates) - 1} others {others})"
    return (
        f"{describe(node)}{which} needs to return one gradient for each input of its forward, for the "
        f"tensors among these of shapes {wanted}, and returned something else. Next: return None for "
        "inputs that are not differentiable, and sum over the dimensions that the forward broadcast."
    )


def _may_be(node: Node, name: str | None) -> bool:
    return node.name() == name if name is not None else isinstance(node, BackwardCFunction)


def failing_node(error: BaseException, running: Node | None) -> Node | None:
    """The node in which ``error`` was raised, if its traceback or the observer shows it."""
    found: Any = running
    for frame in _frames(error.__traceback__):
        # To ask any frame for its locals would keep them, the error itself among them, for as long as the error lives.
        if frame.f_globals.get("__name__") != BackwardCFunction.__module__:
            continue
        node = frame.f_locals.get("self")
        if isinstance(node, BackwardCFunction):
            found = node
    return cast("Node | None", found)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
