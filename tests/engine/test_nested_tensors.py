"""Nested tensors, whose shapes are lists, pass through every way to run backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import scrimp

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)


def nested(layout: torch.layout) -> Tensor:
    """Two parts of two lengths."""
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)


@LAYOUTS
@pytest.mark.parametrize(
    "options",
    [{}, {"order": "memory"}, {"order": "depth-first"}, {"observer": scrimp.Profile()}, {"workers": 2}],
    ids=["plain", "memory", "depth-first", "observed", "workers"],
)
def test_the_gradient_is_that_of_torch(layout: torch.layout, options: dict[str, Any]) -> None:
    """Every part has the gradient that ``loss.backward()`` gives it."""
    for _ in range(2):
        ours, theirs = nested(layout), nested(layout)
        scrimp.backward(sum(part.sum() for part in (ours * 3).sin().unbind()), **options)
        sum(part.sum() for part in (theirs * 3).sin().unbind()).backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert all(map(torch.equal, ours.grad.unbind(), theirs.grad.unbind()))


@LAYOUTS
def test_a_nested_root_needs_its_gradient_as_an_edge_too(layout: torch.layout) -> None:
    """What does not fit is PyTorch's error or ours, and names the node without a shape to tell."""
    with pytest.raises(RuntimeError):
        scrimp.backward(get_gradient_edge(nested(layout) * 2), torch.ones(3))
    with pytest.raises(RuntimeError):
        scrimp.backward(nested(layout) * 2)


@LAYOUTS
def test_an_error_in_a_nested_node_is_described(layout: torch.layout) -> None:
    """The note says that the output was nested."""
    y = nested(layout) * 2
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda made, received: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        scrimp.backward(sum(part.sum() for part in y.unbind()), observer=scrimp.Profile())
    assert "(of output shape nested)" in caught.value.__notes__[0]
