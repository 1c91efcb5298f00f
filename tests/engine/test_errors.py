"""Errors of a backward pass name the node, the shapes and the next step."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import scrimp


class Wrong(torch.autograd.Function):
    """Returns what it is told to from its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, returned: Any) -> Tensor:
        """A product."""
        ctx.returned = returned
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Not the gradient of a product."""
        if isinstance(ctx.returned, Exception):
            raise ctx.returned
        return ctx.returned


def leaf(*shape: int) -> Tensor:
    """Ones that require grad."""
    return torch.ones(*shape, requires_grad=True)


def used_twice() -> None:
    """Two passes over one graph."""
    loss = leaf(3).exp().sum()
    scrimp.backward(loss)
    scrimp.backward(loss)


@pytest.mark.parametrize(
    ("run", "kind", "says"),
    [
        (
            lambda: scrimp.backward(leaf(3) * 2),
            scrimp.errors.GradientMismatchError,
            r"MulBackward0.*\(3,\).*gradient=",
        ),
        (
            lambda: scrimp.backward(leaf(3) * 2, torch.ones(4)),
            scrimp.errors.GradientMismatchError,
            r"shape \(3,\).*MulBackward0.*has \(4,\)",
        ),
        (
            lambda: scrimp.backward(leaf(1) * 2, torch.ones(())),
            scrimp.errors.GradientMismatchError,
            r"shape \(1,\).*has \(\)",
        ),
        (
            lambda: scrimp.backward(leaf(3) * 2, torch.ones(3, dtype=torch.float64)),
            scrimp.errors.GradientMismatchError,
            r"torch.float32.*torch.float64.*\.to\(",
        ),
        (
            lambda: scrimp.backward(leaf(3) * 2, torch.ones(3, device="meta")),
            scrimp.errors.GradientMismatchError,
            "cpu.*meta",
        ),
        (lambda: scrimp.backward(torch.ones(1)), scrimp.errors.GradientMismatchError, "requires_grad_"),
        (
            lambda: scrimp.backward([leaf(1), leaf(1)], [None]),
            scrimp.errors.GradientMismatchError,
            "has 1 for 2 roots",
        ),
        (used_twice, scrimp.errors.GraphFreedError, "ExpBackward0.*retain_graph=True"),
        (
            lambda: scrimp.backward(Wrong.apply(leaf(2), leaf(2), torch.ones(2)).sum()),
            scrimp.errors.GradientMismatchError,
            r"WrongBackward.*\(2,\), \(2,\), any",
        ),
        (
            lambda: scrimp.backward(Wrong.apply(leaf(2), leaf(2), (torch.ones(5), None, None)).sum()),
            scrimp.errors.GradientMismatchError,
            r"WrongBackward.*\(2,\), \(2,\)",
        ),
        (
            lambda: scrimp.backward(Wrong.apply(leaf(2), leaf(2), (torch.ones(2), 3.0, None)).sum()),
            scrimp.errors.GradientMismatchError,
            r"WrongBackward.*\(2,\), \(2,\).*float",
        ),
        (
            lambda: scrimp.backward(Wrong.apply(leaf(2), leaf(2), (torch.ones(2, device="meta"), None, None)).sum()),
            scrimp.errors.GradientMismatchError,
            r"WrongBackward.*\(2,\), \(2,\).*meta",
        ),
        (
            lambda: scrimp.backward(leaf(1, 1) * 2, torch.ones(1)),
            scrimp.errors.GradientMismatchError,
            r"shape \(1, 1\).*MulBackward0.*has \(1,\)",
        ),
        (
            lambda: scrimp.backward([leaf(1) * 2, leaf(1) * 2], [None] * 3),
            scrimp.errors.GradientMismatchError,
            "has 3 for 2 roots",
        ),
        (
            lambda: scrimp.backward((leaf(2) * 1j).sum()),
            scrimp.errors.GradientMismatchError,
            r"SumBackward0.*complex64",
        ),
    ],
    ids=[
        "no gradient",
        "shape",
        "one element",
        "dtype",
        "device",
        "no grad",
        "count",
        "freed",
        "too few",
        "wrong shape",
        "no tensor",
        "wrong device",
        "one element of two dimensions",
        "too many",
        "complex",
    ],
)
def test_an_error_says_need_have_and_next(run: Callable[[], None], kind: type[Exception], says: str) -> None:
    """The message names node and shapes, and what to do."""
    with pytest.raises(kind) as caught:
        run()
    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)
    assert "Next: " in str(caught.value)


def test_every_error_is_one_of_ours_and_a_runtime_error() -> None:
    """Code that catches PyTorch's errors catches ours."""
    with pytest.raises(RuntimeError) as caught:
        scrimp.backward(torch.ones(1))
    assert isinstance(caught.value, scrimp.ScrimpError)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_forward_line_is_named_when_it_is_known() -> None:
    """Under anomaly detection the message says where the node was made."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = leaf(3).exp()
        scrimp.backward(y.sum())
    with pytest.raises(scrimp.errors.GraphFreedError, match=r"ExpBackward0.*made at File .*test_errors\.py"):
        scrimp.backward(y.sum())


def test_the_forward_line_is_the_users() -> None:
    """Not the line of PyTorch that it called."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = torch.nn.Linear(2, 2)(leaf(1, 2))
        z = Wrong.apply(y, y, torch.ones(2))
    with pytest.raises(scrimp.errors.GradientMismatchError, match=r"made at File .*test_errors\.py.*\n *z = Wrong"):
        scrimp.backward(z.sum())


def test_only_nodes_that_are_freed_are_named() -> None:
    """Not one that never saved the tensor that it might have saved."""
    x = leaf(3)
    y = x.exp()
    scrimp.backward(y.sum())
    with pytest.raises(scrimp.errors.GraphFreedError) as caught:
        scrimp.backward((y * 2).sum(), retain_graph=True)
    assert "ExpBackward0" in str(caught.value)
    assert "MulBackward0" not in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
def test_a_root_of_one_element_needs_no_gradient(shape: tuple[int, ...]) -> None:
    """Of whatever shape: the seed has the root's."""
    x = torch.full(shape, 3.0, requires_grad=True)
    scrimp.backward(x * x)
    assert torch.equal(x.grad, torch.full(shape, 6.0))


def test_several_roots_with_and_without_gradients() -> None:
    """Each adds its part."""
    x = leaf(2)
    scrimp.backward([x.sum(), x * 3, (x * 4)[:1]], [None, torch.tensor([1.0, 2.0]), None])
    assert torch.equal(x.grad, torch.tensor([1.0 + 3 + 4, 1 + 6]))


def test_inputs_that_are_no_leaves_receive_gradients() -> None:
    """They get ``.grad``, the leaves behind them nothing; a generator of inputs is read once."""
    x = leaf(2)
    y = x * 2
    scrimp.backward(y.sin().sum(), inputs=(tensor for tensor in [y]))
    assert torch.equal(y.grad, torch.full((2,), 2.0).cos())
    assert x.grad is None


@pytest.mark.parametrize("inputs", [[], (), {}], ids=["list", "tuple", "dict"])
def test_empty_inputs_are_refused(inputs: Any) -> None:
    """As by PyTorch."""
    with pytest.raises(RuntimeError, match="cannot be empty"):
        scrimp.backward(leaf(1) * 2, inputs=inputs)


class Blind(torch.autograd.Function):
    """Passes no gradient to its first input, and looks at which of its outputs have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, seen: list[Any]) -> tuple[Tensor, Tensor]:
        """Two outputs."""
        ctx.set_materialize_grads(False)
        ctx.seen = seen
        return x * 1, y * 1

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        """Hand on what there is."""
        ctx.seen.append((first is None, second is None))
        return None, second, None


@pytest.mark.parametrize(
    "options",
    [{}, {"order": "memory"}, {"order": "depth-first"}, {"observer": scrimp.Profile()}, {"workers": 2}],
    ids=["plain", "memory", "depth-first", "observed", "workers"],
)
def test_nodes_without_gradient_end_and_release_what_they_hold(options: dict[str, Any]) -> None:
    """A node that receives or makes no gradient is run or passed over as by PyTorch, and the pass ends."""
    for _ in range(2):
        x, y, seen = leaf(2), leaf(2), []
        middle = x.exp()
        first, second = Blind.apply(middle, y, seen)
        unused = weakref.ref(first)
        del first
        scrimp.backward(second.sum(), **options)
        assert seen == [(True, False)]
        assert x.grad is None
        assert torch.equal(y.grad, torch.ones(2))
        assert unused() is None
        with pytest.raises(RuntimeError, match="second time"):
            middle.grad_fn._saved_result  # noqa: B018 - freed although it had no gradient


def test_gradients_of_embeddings_accumulate_as_sparse_tensors() -> None:
    """Onto a sparse gradient, and onto a dense one."""
    for before in (None, torch.ones(4, 2)):
        ours, theirs = leaf(4, 2), leaf(4, 2)
        for weight, run in ((ours, scrimp.backward), (theirs, Tensor.backward)):
            weight.grad = None if before is None else before.clone()
            for _ in range(2):
                run(torch.nn.functional.embedding(torch.tensor([1, 2, 1]), weight, sparse=True).sum())
        assert ours.grad.is_sparse == theirs.grad.is_sparse == (before is None)
        assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("name", ["root", "gradient", "observer", "workers"])
def test_arguments_of_another_kind_are_refused(name: str) -> None:
    """The error names the argument, also where it would have no effect."""
    arguments: dict[str, Any] = {"root": leaf(1) * 2, "order": "memory", name: 3.0}
    with pytest.raises((TypeError, ValueError), match=f"{name} needs to be"):
        scrimp.backward(**arguments)


def fails_in_backward(x: Tensor) -> Tensor:
    """Doubled, with a hook that raises."""
    y = x * 2
    y.register_hook(lambda _: 1 / 0)
    return y


@pytest.mark.parametrize("kind", ["ours", "theirs", "branch", "in threads"])
def test_an_error_keeps_no_graph_alive(kind: str) -> None:
    """Once it was handled, what the pass held is gone without the garbage collector."""
    alive: list[weakref.ref[Tensor]] = []

    def run() -> None:
        x = leaf(3)
        y = x.exp()
        alive.append(weakref.ref(y))
        match kind:
            case "ours":
                scrimp.backward(y)
            case "theirs":
                y.register_hook(lambda _: 1 / 0)
                scrimp.backward(y.sum(), observer=scrimp.Profile())
            case "branch":
                scrimp.parallel([lambda x: x * 2, lambda x: 1 / 0], y, workers=2)
            case _:
                results = scrimp.parallel([lambda x: x * 2, fails_in_backward], y, workers=2)
                scrimp.backward(sum(results).sum())

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError, LookupError, scrimp.ScrimpError):
            run()
        assert len(alive) == 1
        assert alive[0]() is None
    finally:
        gc.enable()


def test_an_error_of_a_custom_function_keeps_its_type_and_names_the_node() -> None:
    """The exception is the user's own object, with a note."""
    mine = LookupError("mine")
    with pytest.raises(LookupError) as caught:
        scrimp.backward(Wrong.apply(leaf(2), leaf(2), mine).sum())
    assert caught.value is mine
    assert "WrongBackward (of output shape (2,))" in mine.__notes__[0]


def test_an_observed_pass_knows_the_failing_node() -> None:
    """With an observer the note names the node also when a hook raised."""
    y = leaf(3).exp()
    y.grad_fn.register_hook(lambda made, received: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        scrimp.backward(y.sum(), observer=scrimp.Profile())
    assert "ExpBackward0" in caught.value.__notes__[0]


def test_edges_nests_and_dicts_are_accepted() -> None:
    """Roots and inputs may be gradient edges, sequences or a dict, as in PyTorch."""
    x, y = leaf(2), leaf(2)
    product = x * y
    scrimp.backward([get_gradient_edge(product), x.sum()], [torch.ones(2), None], inputs={"x": x})
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert y.grad is None


def test_a_scalar_edge_needs_no_gradient() -> None:
    """A gradient edge of one element gets the obvious one."""
    x = leaf(2)
    scrimp.backward(get_gradient_edge(x.sum()))
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")  # PyTorch says it once in a process
def test_create_graph_allows_higher_derivatives() -> None:
    """The gradient of the gradient is there."""
    x = leaf(2)
    scrimp.backward((x**3).sum(), create_graph=True, order="depth-first")
    (second,) = torch.autograd.grad(x.grad.sum(), x)
    assert torch.equal(second, torch.full((2,), 6.0))
    x.grad = None
