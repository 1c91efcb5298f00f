"""Random programs in a small language of operators, under random policies, bit for bit against plain torch.

A program is a list of instructions over a growing list of tensors. Instructions that torch refuses (an in-place write
to a leaf, shapes that do not fit) do nothing, so every program is valid. Where plain torch refuses to go backward,
because something that it saved was overwritten, scrimp must refuse too, or know what was there before.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext, suppress
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import scrimp
from scrimp.errors import SavedChangedError, ScrimpError, SourceChangedError
from scrimp.testing import Step, assert_same_outcome

Call = Callable[..., Any]


class Instruction(NamedTuple):
    """An operation, the tensors it takes (as positions from the end), and a small number."""

    name: str
    first: int
    second: int
    number: int


def fit(b: Tensor, a: Tensor) -> Tensor:
    """`b` in a shape that can be combined with `a` without growing it."""
    return b if b.shape == a.shape else b.sum()


class Scale(torch.autograd.Function):
    """A Function of the user's own, which saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x·|x|."""
        y = x * x.abs()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Uses both."""
        x, y = ctx.saved_tensors
        return grad * 2 * x.abs() + 0 * y


def foreign_checkpoint(a: Tensor) -> Tensor:
    """A region of torch's own, with an input that nobody else can overwrite: torch would not notice."""
    return torch.utils.checkpoint.checkpoint(lambda x: F.dropout(x.sin().exp(), 0.2), a.clone(), use_reentrant=False)


def bits_as_mask(a: Tensor) -> Tensor:
    """A number that depends on single bits, through a view as another dtype."""
    return a * (a.detach().contiguous().view(torch.int64) >> 44 & 1)


def complex_square(a: Tensor) -> Tensor:
    """Real pairs seen as complex numbers, and back."""
    pairs = a.reshape(-1)[: a.numel() // 2 * 2].view(-1, 2)
    return torch.view_as_real(torch.view_as_complex(pairs).square())


def normalize(a: Tensor) -> Tensor:
    """Batch norm in training mode with running statistics made on the way."""
    flat = a.reshape(a.shape[0], -1) if a.ndim else a.reshape(1, 1)
    mean, var = torch.zeros(flat.shape[1], dtype=a.dtype), torch.ones(flat.shape[1], dtype=a.dtype)
    y = F.batch_norm(flat, mean, var, training=True)
    return y * mean + var


def under_no_grad(a: Tensor, b: Tensor) -> Tensor:
    """A constant computed without gradients, used with them."""
    with torch.no_grad():
        constant = a.sin() * fit(b, a)
    return a * constant


def written_out(a: Tensor, b: Tensor) -> Tensor:
    """An `out=` buffer that is used twice."""
    out = torch.empty(0, dtype=a.dtype)
    torch.mul(a.detach(), fit(b, a).detach(), out=out)
    y = a * out
    torch.add(out, 1, out=out)
    return y


def sliced_write(a: Tensor, b: Tensor, k: int) -> Tensor:
    """A copy with one slice overwritten through a view."""
    copy = a.clone()
    row = copy.reshape(-1)[k % max(copy.numel(), 1) :]
    row.mul_(fit(b, row).tanh())
    return copy


OPERATIONS: dict[str, Call] = {
    # pointwise, saving inputs, outputs or both
    "sin": lambda a, b, k: a.sin(),
    "tanh": lambda a, b, k: a.tanh(),
    "sigmoid": lambda a, b, k: a.sigmoid(),
    "softmax": lambda a, b, k: a.softmax(-1),
    "mul": lambda a, b, k: a * fit(b, a),
    "add": lambda a, b, k: a + k * fit(b, a),
    "div": lambda a, b, k: a / (1 + fit(b, a).abs()),
    "where": lambda a, b, k: torch.where(a > fit(b, a), a, fit(b, a)),
    "cumsum": lambda a, b, k: a.cumsum(-1),
    "layer_norm": lambda a, b, k: F.layer_norm(a, a.shape[-1:]),
    "matmul": lambda a, b, k: a.reshape(a.shape[0], -1).T @ a.reshape(a.shape[0], -1),
    "bits": lambda a, b, k: bits_as_mask(a),
    "complex": lambda a, b, k: complex_square(a),
    "batch_norm": lambda a, b, k: normalize(a),
    "function": lambda a, b, k: Scale.apply(a),
    "checkpoint": lambda a, b, k: foreign_checkpoint(a),
    # views
    "transpose": lambda a, b, k: a.transpose(0, -1),
    "flatten": lambda a, b, k: a.view(-1),
    "slice": lambda a, b, k: a[k % 2 :],
    "stride": lambda a, b, k: a[..., :: 1 + k % 2],
    "expand": lambda a, b, k: a[:1].expand(2, *a.shape[1:]),
    "diagonal": lambda a, b, k: a.diagonal(),
    "unsqueeze": lambda a, b, k: a.unsqueeze(k % 2),
    "select": lambda a, b, k: a[k % a.shape[0]],
    "detach": lambda a, b, k: a.detach(),
    # several results
    "split": lambda a, b, k: a.split(1 + k % 3),
    "chunk": lambda a, b, k: a.chunk(2, dim=-1),
    "unbind": lambda a, b, k: a.unbind(0)[:2],
    "unsafe_split": lambda a, b, k: [piece * 2 for piece in torch.unsafe_split(a, 1 + k % 3)],  # not to be written
    "max": lambda a, b, k: a.max(dim=-1).values,
    "sort": lambda a, b, k: a.sort(dim=-1).values,
    "var_mean": lambda a, b, k: torch.var_mean(a, dim=-1, correction=0),
    "cat": lambda a, b, k: torch.cat([a, a * 2, fit(b, a).expand_as(a)])[:4],
    "stack": lambda a, b, k: torch.stack([a, fit(b, a).expand_as(a)]).sum(0),
    # writes
    "mul_": lambda a, b, k: a.mul_(1 + k),
    "add_": lambda a, b, k: a.add_(fit(b, a)),
    "relu_": lambda a, b, k: a.relu_(),
    "sigmoid_": lambda a, b, k: a.sigmoid_(),
    "zero a row": lambda a, b, k: a[k % a.shape[0]].zero_(),
    "copy into a slice": lambda a, b, k: a[:1].copy_(fit(b, a[:1])),
    "masked_fill_": lambda a, b, k: a.masked_fill_(a > 0, 0.5),
    "transpose_": lambda a, b, k: a.transpose_(0, -1),
    "set an item": lambda a, b, k: a.__setitem__(0, b.sum()),
    "write through detach": lambda a, b, k: a.detach().mul_(1 + k),
    "write a copy": lambda a, b, k: sliced_write(a, b, k),
    "out": lambda a, b, k: written_out(a, b),
    # draws
    "dropout": lambda a, b, k: F.dropout(a, 0.3),
    "dropout_": lambda a, b, k: F.dropout(a, 0.3, inplace=True),
    "rand_like": lambda a, b, k: a * torch.rand_like(a),
    "bernoulli": lambda a, b, k: a * torch.bernoulli(torch.full_like(a, 0.5)),
    "rrelu": lambda a, b, k: F.rrelu(a, training=True),
    "normal_": lambda a, b, k: a * torch.empty_like(a).normal_(),
    "own generator": lambda a, b, k: a * torch.rand(a.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(k)),
    # sections
    "no_grad": lambda a, b, k: under_no_grad(a, b),
}
PLAIN_REGION = {"region": lambda a, b, k: region(a, b)}
SCRIMP_REGION = {"region": lambda a, b, k: scrimp.checkpoint(region, a, b=b)}


def region(a: Tensor, b: Tensor) -> Tensor:
    """What the instruction `region` does: plainly, or as a checkpointed region."""
    return F.dropout((a * fit(b, a)).tanh(), 0.2) * a


instructions = st.builds(
    Instruction,
    st.sampled_from(["region", "forget", *OPERATIONS]),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 3),
)


class Backward(Enum):
    """When and how often backward runs."""

    OUTSIDE = "outside"
    INSIDE = "inside"
    TWICE = "twice"


class Program:
    """Runs instructions; `most` tensors are remembered, so that others are alive only for autograd."""

    most = 8

    def __init__(self, instructions: list[Instruction], operations: dict[str, Call], drawing: Tensor) -> None:
        self._instructions = instructions
        self._operations = operations
        self.leaf = drawing.requires_grad_()

    def __call__(self) -> list[Tensor]:
        """The last tensors that carry gradients."""
        tensors = [self.leaf, self.leaf * 1.5]
        for instruction in self._instructions:
            self._step(tensors, instruction)
        return [tensor for tensor in tensors if tensor.requires_grad][-3:]

    def _step(self, tensors: list[Tensor], instruction: Instruction) -> None:
        a, b = (tensors[-1 - where % len(tensors)] for where in instruction[1:3])
        if instruction.name == "forget":
            del tensors[: len(tensors) - 1 - instruction.first]
            return
        try:
            results = (OPERATIONS | self._operations)[instruction.name](a, b, instruction.number)
        except ScrimpError:
            raise
        except (RuntimeError, IndexError, ValueError):
            return  # torch refuses it, with scrimp or without
        for result in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(result, Tensor) and 0 < result.numel() <= 64:
                tensors.append(result)
        del tensors[: max(0, len(tensors) - self.most)]


def make_step(
    instructions: list[Instruction],
    mode: Backward,
    operations: dict[str, Call],
    session: Callable[[], Any] = nullcontext,
) -> Step:
    """The program on a leaf of three rows and four columns."""
    program = Program(instructions, operations, torch.randn(3, 4, dtype=torch.float64))
    plain = Step(program, state=program.leaf)

    def forward() -> list[Tensor]:
        with session():
            outputs = program()
            if mode is Backward.INSIDE:
                plain.backward(outputs)
        return [output.detach() for output in outputs] if mode is Backward.INSIDE else outputs

    def backward(outputs: list[Tensor]) -> None:
        roots = [output for output in outputs if output.requires_grad]
        if mode is Backward.TWICE and roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots], retain_graph=True)
        plain.backward(outputs)

    return dataclasses.replace(plain, forward=forward, backward=backward)


def assert_program_is_exact(instructions: list[Instruction], mode: Backward, policy: Callable[[], Any]) -> None:
    """Compare with plain; where plain refuses to go backward and we do not, with torch that copies what it saves."""

    def make_plain() -> Step:
        return make_step(instructions, mode, PLAIN_REGION)

    def make_copying() -> Step:
        return make_step(
            instructions, mode, PLAIN_REGION, lambda: saved_tensors_hooks(copy_in_layout, lambda saved: saved)
        )

    def make_ours() -> Step:
        return make_step(instructions, mode, SCRIMP_REGION, lambda: scrimp.session(policy=policy()))

    if not is_refused(make_plain):
        assert_same_outcome(make_plain, make_ours)
    elif not is_refused(make_copying):
        # Torch fills rrelu's noise after it has saved it, so that a copy would hold garbage.
        reference = make_ours if any(each.name == "rrelu" for each in instructions) else make_copying
        with suppress(SavedChangedError, SourceChangedError):
            assert_same_outcome(reference, make_ours)


def copy_in_layout(saved: Tensor) -> Tensor:
    """A copy that kernels treat as they would the original: the same strides, also where there are gaps."""
    storage = saved.untyped_storage().clone()
    return torch.empty(0, dtype=saved.dtype).set_(storage, saved.storage_offset(), saved.size(), saved.stride())


def is_refused(make: Callable[[], Step]) -> bool:
    """Whether torch raises in forward or backward."""
    torch.default_generator.manual_seed(0)
    step = make()
    try:
        step.backward(step.forward())
    except RuntimeError as refusal:
        note(f"torch refuses: {refusal}")
        return True
    return False


programs = given(
    instructions=st.lists(instructions, min_size=1, max_size=25),
    mode=st.sampled_from(Backward),
    seed=st.integers(0, 1000),
    drop=st.sampled_from([0.3, 0.7, 1.0]),
)
steadily = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@settings(steadily, max_examples=150)
@programs
def test_programs_are_exact(
    random_policy: Callable[..., Any], instructions: list[Instruction], mode: Backward, seed: int, drop: float
) -> None:
    """A few programs of up to 25 instructions."""
    assert_program_is_exact(instructions, mode, lambda: random_policy(seed, drop))


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@settings(steadily, max_examples=100)
@programs
def test_programs_with_a_store_are_exact(
    random_store_policy: Callable[..., Any], instructions: list[Instruction], mode: Backward, seed: int, drop: float
) -> None:
    """Where some values are stored, and a store with little room lets some be dropped instead."""
    host = scrimp.store.Host(None if drop < 1 else 200)
    assert_program_is_exact(instructions, mode, lambda: random_store_policy(seed, host))
    assert host.statistics.held.bytes == 0


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@pytest.mark.slow
@settings(steadily, max_examples=3000)
@programs
def test_many_programs_are_exact(
    random_policy: Callable[..., Any], instructions: list[Instruction], mode: Backward, seed: int, drop: float
) -> None:
    """Many of them."""
    assert_program_is_exact(instructions, mode, lambda: random_policy(seed, drop))


def test_every_operation_does_something() -> None:
    """No instruction is refused by torch on a fresh tensor, else it would test nothing."""
    for name in [*OPERATIONS, "region"]:
        for operations in (PLAIN_REGION, SCRIMP_REGION):
            a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) * 1
            (OPERATIONS | operations)[name](a, a * 2, 1)


def test_a_wrong_gradient_is_found() -> None:
    """A session that rounds what autograd saves does not get past the comparison."""
    rounding = saved_tensors_hooks(lambda saved: saved, lambda saved: saved.float().double())
    program = [Instruction("sin", 0, 0, 0)]
    with pytest.raises(AssertionError, match="gradient of state differs"):
        assert_same_outcome(
            lambda: make_step(program, Backward.OUTSIDE, PLAIN_REGION),
            lambda: make_step(program, Backward.OUTSIDE, PLAIN_REGION, lambda: rounding),
        )
