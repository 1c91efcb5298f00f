"""``scrimp.parallel`` on a GPU: a stream for each branch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import scrimp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def branches(count: int, width: int) -> list[nn.Module]:
    """MLPs with known weights."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).cuda() for _ in range(count)]


def gradients(run: object, count: int = 4, width: int = 512) -> list[Tensor]:
    """Those of the input and of all parameters, after a step through ``run``."""
    modules = branches(count, width)
    torch.manual_seed(1)
    leaf = torch.randn(256, width, device="cuda", requires_grad=True)
    results = run(modules, leaf * 2)  # type: ignore[operator]
    scrimp.backward(sum(result.square().mean() for result in results))
    return [leaf.grad, *[p.grad for module in modules for p in module.parameters()]]


def serially(modules: list[nn.Module], x: Tensor) -> list[Tensor]:
    """One after the other."""
    return [module(x) for module in modules]


@pytest.mark.parametrize("workers", ["auto", 1, 2, 4])
def test_gradients_are_bit_identical(workers: int | str) -> None:
    """Streams change no bit, however often it is repeated."""
    expected = gradients(serially)
    for _ in range(20):
        found = gradients(lambda modules, x: scrimp.parallel(modules, x, workers=workers))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_each_branch_gets_a_stream() -> None:
    """Branches see side streams, different ones, and the caller's stream is what it was."""
    outer = torch.cuda.current_stream()
    x = torch.ones(4, device="cuda")
    seen = scrimp.parallel([lambda x: torch.cuda.current_stream().cuda_stream] * 3, x, workers=3)
    assert len({outer.cuda_stream, *seen}) == 4
    assert torch.cuda.current_stream() == outer


def test_results_can_be_used_and_freed_at_once() -> None:
    """Memory of a freed result is not reused while the caller's stream still reads it."""
    x = torch.ones(1 << 22, device="cuda")
    totals = []
    for _ in range(50):
        first, second = scrimp.parallel([lambda x: x * 2, lambda x: x * 3], x)
        totals.append((first + second).sum())
        del first, second
    assert all(total.item() == 5 * x.numel() for total in totals)


def test_an_error_in_a_branch_leaves_the_streams_joined() -> None:
    """The error surfaces, and later work on the caller's stream waits for what was begun."""
    x = torch.ones(1 << 20, device="cuda")

    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError("in a branch")

    outer = torch.cuda.current_stream()
    with pytest.raises(ArithmeticError):
        scrimp.parallel([lambda x: x.mul(2), fail], x)
    assert torch.cuda.current_stream() == outer
    torch.cuda.synchronize()
