"""What branches must not do is an error that says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import scrimp


def test_differentiating_twice_is_refused() -> None:
    """``create_graph=True`` is an error that says what to do."""
    x = torch.ones(2, requires_grad=True)
    loss = sum(scrimp.parallel([torch.sin, torch.cos], x, workers=2)).sum()
    with pytest.raises(scrimp.errors.BranchError, match="workers=1"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_random_numbers_in_threads_are_refused() -> None:
    """Who draws what would be chance: an error, and the generator is as it was."""
    state = torch.get_rng_state()
    with pytest.raises(scrimp.errors.BranchError, match="generator"):
        scrimp.parallel([torch.dropout] * 2, torch.ones(8), 0.5, True, workers=2)
    assert torch.equal(state, torch.get_rng_state())


def test_a_tensor_captured_by_two_branches_is_refused() -> None:
    """Two branches over one outer activation would run its node twice."""
    x = torch.ones(2, requires_grad=True)
    hidden = x.sin()
    with pytest.raises(scrimp.errors.BranchError, match=r"SinBackward0.*as an input"):
        scrimp.parallel([lambda x: x * hidden, lambda x: x + hidden], x, workers=2)


def test_a_captured_tensor_of_the_outer_pass_is_refused() -> None:
    """One branch over an activation that the outer pass runs as well is an error, not a wrong sum."""
    x = torch.ones(2, requires_grad=True)
    hidden = x.sin()
    first, second = scrimp.parallel([lambda x: x * hidden, lambda x: x + 1], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="SinBackward0"):
        (first + second + hidden).sum().backward()


def test_a_hook_on_a_branchs_input_is_refused() -> None:
    """It would see a part of the gradient only."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(scrimp.errors.BranchError, match="registered a hook"):
        scrimp.parallel([lambda x: x.register_hook(print) and x * 2, torch.sin], x, workers=2)


def test_a_tensor_that_slips_out_of_a_branch_is_refused() -> None:
    """A tensor that was kept and not returned would lose the gradient of the inputs: an error."""
    x = torch.ones(2, requires_grad=True)
    kept: list[Tensor] = []
    scrimp.parallel([lambda x: kept.append(x.sin()), torch.cos], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="return"):
        scrimp.backward(kept[0].sum())


def test_a_result_in_an_unknown_container_is_refused() -> None:
    """Tensors inside of an object that is no nest are not found, so using them is an error, not a gradient of zero."""

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([lambda x: Box(x.sin()), torch.cos], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="nest"):
        (first.value + second).sum().backward()


def test_changing_an_input_in_place_is_refused() -> None:
    """A branch that writes to what the others read does not get away with it."""
    x = torch.ones(2, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="inplace"):
        scrimp.parallel([lambda x: x.mul_(2), torch.sin], x, workers=2)


def test_changing_a_result_that_backward_needs_is_noticed() -> None:
    """In-place operators on a branch's result raise, as they do on any saved tensor."""
    x = torch.ones(2, requires_grad=True)
    first, _ = scrimp.parallel([torch.sigmoid, torch.sin], x, workers=2)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        first.mul_(2).sum().backward()
