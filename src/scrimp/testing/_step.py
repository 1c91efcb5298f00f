"""Running a training step plainly and under scrimp, and comparing all that it leaves behind."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from scrimp.testing._bits import assert_same_tensor


class NondeterministicStepError(AssertionError):
    """Two plain runs of the step differ, so nothing can be said about scrimp."""


def backward_of_every_output(output: object) -> None:
    """Backpropagate from each tensor in `output` that requires grad, with fixed random cotangents."""
    roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(0)
    if roots:
        torch.autograd.backward(roots, [_cotangent(root, generator) for root in roots])


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One training step, built anew for every run.

    Attributes:
        forward: runs the forward pass; returns any pytree of tensors.
        state: a pytree of the modules and tensors whose values and gradients are compared afterwards.
        backward: gets what `forward` returned. The default backpropagates from every output: from a real
            scalar as `loss.backward()` does, from others with a fixed random cotangent.
        generators: your own `torch.Generator`s, whose next draws are compared; the default generators of
            torch, Python and NumPy always are.
    """

    forward: Callable[[], object]
    state: object = ()
    backward: Callable[[object], None] = backward_of_every_output
    generators: Sequence[torch.Generator] = ()


def assert_same_step(
    make_step: Callable[[], Step],
    session: Callable[[], AbstractContextManager[object]],
    *,
    backward_inside: bool = False,
    seed: int = 0,
) -> None:
    """Raise unless a step under `session` leaves every bit as the plain step does.

    The step is built and run twice from the same seeds. Compared are outputs, parameters, buffers and other
    state, every gradient (also whether there is one), and the next draws of every random generator. If they
    differ, a second plain run tells whether the step itself repeats.

    Args:
        make_step: builds the step, its modules and its inputs; called once a run, after seeding.
        session: makes the context that the forward pass runs in.
        backward_inside: also run the backward pass in that context.
        seed: for the generators of torch, Python and NumPy. Their states are put back afterwards.

    Raises:
        NondeterministicStepError: two plain runs differ already.
        AssertionError: naming the first tensor that differs, how many elements, and by how much.
        ValueError: no state has a gradient after the plain step, so there is too little to compare.

    Example:
        >>> import scrimp
        >>> def make_step():
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        ...     x = torch.randn(16, 4)
        ...     return Step(lambda: model(x).square().mean(), state=model)
        >>> assert_same_step(make_step, lambda: scrimp.session(policy=scrimp.policy.KeepNone()))
    """
    plain = _outcome(make_step, nullcontext, seed, backward_inside)
    if not any(name.startswith("gradient") and value is not None for name, value in plain.items()):
        raise ValueError(
            "Need a step whose state has gradients after backward, have none: "
            "list the model and the inputs that require grad in Step(state=...)."
        )
    ours = _outcome(make_step, session, seed, backward_inside)
    _assert_same(plain, ours, again=lambda: _outcome(make_step, nullcontext, seed, backward_inside))


def assert_same_outcome(make_plain: Callable[[], Step], *make_ours: Callable[[], Step], seed: int = 0) -> None:
    """Raise unless other ways to write a step leave every bit as the plain way; for code that calls scrimp itself.

    What is compared, and what is raised, is as in `assert_same_step`, but a step without gradients will do.

    Example:
        >>> import scrimp
        >>> def make(call):
        ...     x = torch.randn(3, requires_grad=True)
        ...     return Step(lambda: call(torch.sin, x), state=x)
        >>> assert_same_outcome(lambda: make(lambda f, x: f(x)), lambda: make(scrimp.checkpoint))
    """
    plain = _outcome(make_plain, nullcontext, seed)
    for make in make_ours:
        ours = _outcome(make, nullcontext, seed)
        _assert_same(plain, ours, again=lambda: _outcome(make_plain, nullcontext, seed))


Outcome: TypeAlias = Mapping[str, Tensor | None]


def _assert_same(plain: Outcome, ours: Outcome, again: Callable[[], Outcome]) -> None:
    try:
        _compare(plain, ours)
    except AssertionError:
        try:
            _compare(plain, again())
        except AssertionError as difference:
            raise NondeterministicStepError(
                "Need a step that repeats: two plain runs from the same seeds differ already. "
                "Build everything anew in make_step, and seed your own generators there. "
                f"The difference: {difference}"
            ) from None
        raise


def _compare(expected: Outcome, actual: Outcome) -> None:
    if expected.keys() != actual.keys():
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise AssertionError(f"The step left different tensors: missing {missing}, extra {extra}")
    for name, tensor in expected.items():
        assert_same_tensor(name, tensor, actual[name])


def _outcome(
    make_step: Callable[[], Step],
    session: Callable[[], AbstractContextManager[object]],
    seed: int,
    backward_inside: bool = False,
) -> Outcome:
    with _seeded(seed):
        step = make_step()
        with session():
            output = step.forward()
            if backward_inside:
                step.backward(output)
        if not backward_inside:
            step.backward(output)
        outcome: dict[str, Tensor | None] = {}
        for name, tensor in _named_tensors(output):
            outcome[f"output{name}"] = _snapshot(tensor)
        for name, tensor in _named_tensors(step.state):
            outcome[f"state{name}"] = _snapshot(tensor)
            if tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad):
                outcome[f"gradient of state{name}"] = None if tensor.grad is None else _snapshot(tensor.grad)
        for name, draw in _next_draws(step.generators):
            outcome[f"next draw of {name}"] = draw
        return outcome


def _named_tensors(tree: object) -> Iterator[tuple[str, Tensor]]:
    leaves, _ = tree_flatten_with_path(tree)
    for path, leaf in leaves:
        match leaf:
            case Tensor():
                yield keystr(path), leaf
            case torch.nn.Module():
                for name, tensor in (*leaf.named_parameters(), *leaf.named_buffers()):
                    yield f"{keystr(path)}.{name}", tensor


def _snapshot(tensor: Tensor) -> Tensor:
    # A copy: a step that is not built anew would otherwise be compared with itself.
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _cotangent(root: Tensor, generator: torch.Generator) -> Tensor | None:
    if root.layout != torch.strided or root.is_nested:
        return root.detach().clone()  # what is sure to have the right layout
    if root.ndim == 0 and not root.is_complex():
        return None
    wide = torch.complex128 if root.is_complex() else torch.float64
    return torch.randn(root.shape, dtype=wide, generator=generator).to(root)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    numpy = sys.modules.get("numpy")  # a step can only draw from it if somebody has imported it
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        # Not `torch.manual_seed`: without a GPU it queues a call, with a stack trace, for a CUDA to come.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def _next_draws(generators: Sequence[torch.Generator]) -> Iterator[tuple[str, Tensor]]:
    numpy = sys.modules.get("numpy")
    if numpy:
        yield "NumPy", torch.tensor(numpy.random.random(3))
    yield "Python", torch.tensor([random.random() for _ in range(3)], dtype=torch.float64)
    yield "torch's CPU generator", _draw(torch.default_generator)
    for index in range(torch.cuda.device_count()):
        yield f"torch's generator of cuda:{index}", _draw(torch.cuda.default_generators[index])
    for index, generator in enumerate(generators):
        yield f"generators[{index}]", _draw(generator)


def _draw(generator: torch.Generator) -> Tensor:
    # Odd numbers of normals in both precisions: a generator also remembers the spare one of each.
    options = {"generator": generator, "device": generator.device}
    return torch.cat(
        [torch.randn(3, dtype=dtype, **options).double() for dtype in (torch.float32, torch.float64)]  # type: ignore[call-overload]
    )
