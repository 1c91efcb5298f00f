"""The model set of the benchmarks, in its tiny size."""

import pytest
import torch

from models import MODELS


def step(name: str) -> list[torch.Tensor | None]:
    """The loss and all gradients of one step of a model made anew."""
    with torch.random.fork_rng(devices=[]):
        module, make_batch = MODELS[name](tiny=True, device="cpu")
        loss = module(*make_batch())
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_finite_and_repeats(name: str) -> None:
    """Making a model and stepping twice gives the same bits, a scalar loss and gradients."""
    first, second = step(name), step(name)
    assert first[0].numel() == 1
    assert sum(gradient is not None for gradient in first) > len(first) // 2
    for one, other in zip(first, second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.isfinite().all()
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_the_real_size_is_made_without_memory(name: str) -> None:
    """On the meta device, the model of a GPU and its batch are only described."""
    module, make_batch = MODELS[name](tiny=False, device="meta")
    assert all(tensor.is_meta for tensor in (*module.parameters(), *make_batch()))
