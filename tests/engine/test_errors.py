"""Errors of a backward pass name the node, the shapes and the next step."""

from __future__ import annotations

import re
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
