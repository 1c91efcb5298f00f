"""Every operator of torch's own database that supports autograd, bit for bit against plain torch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map

import scrimp
from scrimp.policy import KeepNone
from scrimp.testing import Step, assert_same_outcome

Session = Callable[[], AbstractContextManager[object]]

OPERATORS = {op.formatted_name: op for op in op_db if op.supports_autograd}

# Operators that differ between two plain runs; `test_the_excluded_do_not_repeat` proves it.
EXCLUDED = {
    "linalg_lstsq": "LAPACK's solver rounds differently from call to call",
    "linalg_lstsq_grad_oriented": "the same operator with other samples",
}


def differentiable_dtypes(op: OpInfo, device: str = "cpu") -> set[torch.dtype]:
    """The dtypes in which an operator has a gradient."""
    return op.supported_dtypes(device) & op.supported_backward_dtypes(device)


JUDGED = [name for name in OPERATORS if name not in EXCLUDED]

# Their samples are views whose memory beyond the view is read too, so a copy of the view will not do.
READS_AROUND_ITS_INPUT = {"as_strided_partial_views"}

DTYPES = (torch.float64, torch.float32, torch.bfloat16)

# Samples and operators warn of what torch deprecates or calls a prototype; none of it is about scrimp.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", JUDGED)
def test_first_samples_are_exact(name: str, random_policy: Callable[..., Any]) -> None:
    """The first two samples in float64, with everything dropped and with a random half dropped."""
    op = OPERATORS[name]
    for dtype in dtypes_of(op)[:1]:
        for index, sample in enumerate(samples_of(op, dtype, most=2)):
            assert_operator_is_exact(op, sample, KeepNone, functools.partial(random_policy, index))


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_all_samples_are_exact(name: str, random_policy: Callable[..., Any]) -> None:
    """All samples in every dtype, with everything dropped and with a random half dropped."""
    op = OPERATORS[name]
    for dtype in dtypes_of(op):
        for index, sample in enumerate(samples_of(op, dtype)):
            assert_operator_is_exact(op, sample, KeepNone, functools.partial(random_policy, index))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in JUDGED if torch.complex128 in differentiable_dtypes(OPERATORS[name])]
)
def test_first_complex_samples_are_exact(name: str, random_policy: Callable[..., Any]) -> None:
    """The first two complex samples of those operators that take real ones as well."""
    op = OPERATORS[name]
    for index, sample in enumerate(samples_of(op, torch.complex128, most=2)):
        assert_operator_is_exact(op, sample, KeepNone, functools.partial(random_policy, index))


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_backward_inside_is_exact(name: str) -> None:
    """The first two samples, with everything dropped and backward inside the session."""
    op = OPERATORS[name]
    for dtype in differentiable_dtypes(op) & {torch.float64, torch.complex128}:
        for sample in samples_of(op, dtype, most=2):
            assert_same_outcome(lambda: make_step(op, sample), lambda: step_inside(op, sample))  # noqa: B023


@pytest.mark.parametrize("name", EXCLUDED)
def test_the_excluded_do_not_repeat(name: str) -> None:
    """An excluded operator differs between plain runs; if it no longer does, it must come off the list."""
    op = OPERATORS[name]
    samples = list(samples_of(op, torch.float64)) * 50

    def compare_plain_with_plain() -> None:
        for sample in samples:
            assert_same_outcome(lambda: make_step(op, sample), lambda: make_step(op, sample))  # noqa: B023

    with pytest.raises(AssertionError, match="differs"):
        compare_plain_with_plain()


def test_an_operator_that_is_not_exact_is_found() -> None:
    """A session that rounds what autograd saves fails, and the message says for which sample."""
    op = OPERATORS["sin"]
    rounding = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved.bfloat16().double())
    with pytest.raises(AssertionError, match=r"gradient of state.*differs") as error:
        assert_sessions_are_exact(op, next(samples_of(op, torch.float64)), lambda: rounding)
    assert "operator sin" in error.value.__notes__[0]


def dtypes_of(op: OpInfo, device: str = "cpu") -> list[torch.dtype]:
    """The dtypes to try: floating ones, or a complex one where the operator takes nothing else."""
    supported = differentiable_dtypes(op, device)
    floating = [dtype for dtype in DTYPES if dtype in supported]
    return floating or [dtype for dtype in (torch.complex128,) if dtype in supported]


def samples_of(op: OpInfo, dtype: torch.dtype, most: int | None = None, device: str = "cpu") -> Iterator[SampleInput]:
    """The database's sample inputs, the same at every call."""
    torch.manual_seed(0) if device == "cuda" else torch.default_generator.manual_seed(0)
    # Not `op.sample_inputs`: that searches the stack for a TestCase, which takes 100 ms a call under pytest.
    return itertools.islice(op.sample_inputs_func(op, device, dtype, requires_grad=True), most)


def assert_operator_is_exact(op: OpInfo, sample: SampleInput, *policies: Callable[[], Any]) -> None:
    """Compare one sample's step under each policy with the plain step."""
    sessions = [lambda policy=policy: scrimp.session(policy=policy()) for policy in policies]
    assert_sessions_are_exact(op, sample, *sessions)


def assert_sessions_are_exact(op: OpInfo, sample: SampleInput, *sessions: Session) -> None:
    """Compare one sample's step under each session with the plain step; say which sample it was."""

    def make_ours(session: Session) -> Step:
        step = make_step(op, sample)

        def forward() -> object:
            with session():
                return step.forward()

        return dataclasses.replace(step, forward=forward)

    try:
        assert_same_outcome(
            lambda: make_step(op, sample), *(functools.partial(make_ours, session) for session in sessions)
        )
    except Exception as error:
        error.add_note(f"operator {op.formatted_name}, sample {sample.summary()}")
        raise


def step_inside(op: OpInfo, sample: SampleInput) -> Step:
    """The step with its backward pass inside a session that keeps nothing."""
    step = make_step(op, sample)

    def forward() -> object:
        with scrimp.session(KeepNone()):
            outputs = step.forward()
            step.backward(outputs)
        return outputs

    return dataclasses.replace(step, forward=forward, backward=lambda outputs: None)


def make_step(op: OpInfo, sample: SampleInput) -> Step:
    """The operator on leaves; amid other operators; and in place, where it can.

    Amid others its inputs are themselves values of the step (negated twice, which changes no bit), and its
    outputs are saved by the multiplication that follows.
    """
    leaves = {name: copy_of(sample) for name in ("bare", "amid", "in place")}
    finish = sample.output_process_fn_grad

    def forward() -> list[object]:
        first, args, kwargs = leaves["bare"]
        outputs = [finish(op(first, *args, **kwargs))]
        if op.formatted_name in READS_AROUND_ITS_INPUT:
            return outputs
        first, args, kwargs = tree_map(negate_twice, leaves["amid"])
        outputs.append(tree_map(square, finish(op(first, *args, **kwargs))))
        if can_write(op, sample, outputs[0]):
            first, args, kwargs = tree_map(negate_twice, leaves["in place"])
            outputs.append((finish(square(op.inplace_variant(first, *args, **kwargs))), first))
        return outputs

    return Step(forward, state=leaves)


def can_write(op: OpInfo, sample: SampleInput, output: object) -> bool:
    """Whether the operator has an in-place form that takes this sample: neither shape nor dtype may grow."""
    return (
        op.inplace_variant is not None
        and op.supports_inplace_autograd
        and not sample.broadcasts_input
        and isinstance(output, Tensor)
        and output.dtype == sample.input.dtype
    )


def copy_of(sample: SampleInput) -> tuple[object, ...]:
    """Leaves of its own for each run, with the memory around them where they are views."""
    return tree_map(copy_leaf, (sample.input, sample.args, sample.kwargs))


def copy_leaf(leaf: object) -> object:
    """A tensor's copy; other arguments as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout != torch.strided or leaf.is_nested or leaf.is_conj() or leaf.is_neg():
        copy = leaf.detach().clone()
    else:
        storage = leaf.untyped_storage().clone()
        copy = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
            storage, leaf.storage_offset(), leaf.size(), leaf.stride()
        )
    return copy.requires_grad_(leaf.requires_grad)


def negate_twice(leaf: object) -> object:
    """The same bits, made by an operator."""
    return leaf.neg().neg() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def square(leaf: object) -> object:
    """An operator that saves its input."""
    return leaf * leaf if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
