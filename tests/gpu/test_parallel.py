"""``scrimp.parallel`` on a GPU: a stream for each branch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp

pytestmark = pytest.mark.filterwarnings("ignore:scrimp.parallel was given modules of one type:UserWarning")


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


def late(x: Tensor) -> Tensor:
    """The same values, some tens of milliseconds later, on the current stream."""
    torch.cuda._sleep(50_000_000)
    return x * 1


class LateGradient(torch.autograd.Function):
    """The identity, with a backward that takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same values."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient, late."""
        return late(gradient)


def test_branches_wait_for_their_inputs() -> None:
    """What the caller's stream has yet to compute is not read before it is there."""
    for number in range(5):
        x = late(torch.full((1 << 20,), float(number), device="cuda"))
        first, second = scrimp.parallel([lambda x: x + 1, lambda x: x + 2], x)
        assert first.sum().item() == (number + 1) * x.numel()
        assert second.sum().item() == (number + 2) * x.numel()


def test_the_caller_waits_for_the_branches() -> None:
    """Results that the branches have yet to compute are not read before they are there."""
    for number in range(5):
        x = torch.full((1 << 20,), float(number), device="cuda")
        first, second = scrimp.parallel([lambda x: late(x) + 1, lambda x: late(x) + 2], x)
        assert (first + second).sum().item() == (2 * number + 3) * x.numel()


def test_backward_waits_for_the_branches_gradients() -> None:
    """The sum at a shared input, and reading it afterwards on the caller's stream, wait for the slowest branch."""
    for number in range(5):
        leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
        branches = [lambda x, by=by: LateGradient.apply(x) * by for by in (2.0 + number, 3.0)]
        scrimp.backward(sum(result.sum() for result in scrimp.parallel(branches, leaf * 1)))
        assert torch.equal(leaf.grad, torch.full_like(leaf, 5.0 + number))


def test_an_input_freed_early_is_not_overwritten() -> None:
    """The memory of an input that the caller drops is not reused while a slow branch has yet to read it."""
    for _ in range(10):
        x = torch.ones(1 << 20, device="cuda")
        result, _ = scrimp.parallel([lambda x: late(x[:1]).sum() * 0 + x.sum(), lambda x: x[0]], x)
        del x
        scribble = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(4)]
        assert result.item() == 1 << 20
        del scribble


def test_what_a_branch_saved_is_not_overwritten_in_backward() -> None:
    """Tensors that backward frees on the host, while streams have yet to read them, keep their values."""
    expected = gradients(serially, width=256)

    def slow(modules: list[nn.Module], x: Tensor) -> list[Tensor]:
        branches = [lambda x, of=module: LateGradient.apply(of(x)) for module in modules]
        results = scrimp.parallel(branches, x)
        del x
        return [result * 1 for result in results]

    for _ in range(5):
        found = gradients(slow, width=256)
        scribble = [torch.full((256, 256), 7.0, device="cuda") for _ in range(16)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        del scribble


def test_the_peak_does_not_grow_over_steps() -> None:
    """Streams of later steps use the memory that those of earlier ones left."""
    for _ in range(3):
        gradients(scrimp.parallel)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(40):
        gradients(scrimp.parallel)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_branches_find_the_callers_device_and_autocast() -> None:
    """A stream of the inputs' device changes neither."""
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        seen = scrimp.parallel([lambda x: (torch.cuda.current_device(), (x @ x).dtype)] * 2, x)
    assert seen == [(torch.cuda.current_device(), torch.bfloat16)] * 2


def test_sparse_inputs_and_results() -> None:
    """Their indices and values are kept for the streams that use them."""
    x = torch.eye(64, device="cuda").to_sparse()
    first, second = scrimp.parallel([lambda x: (x * 2).to_dense(), lambda x: x * 3], x)
    assert torch.equal(first, torch.eye(64, device="cuda") * 2)
    assert torch.equal(second.to_dense(), torch.eye(64, device="cuda") * 3)


def test_workers_on_the_cpu_have_the_callers_stream() -> None:
    """Branches over CPU tensors that use the GPU do so on the stream that the caller had chosen."""
    stream = torch.cuda.Stream()
    barrier = threading.Barrier(2, timeout=20)

    def look(x: Tensor) -> int:
        barrier.wait()
        return torch.cuda.current_stream().cuda_stream

    with torch.cuda.stream(stream):
        assert scrimp.parallel([look, look], torch.ones(1), workers=2) == [stream.cuda_stream] * 2


@pytest.mark.parametrize("order", ["torch", "depth-first", "memory"])
def test_orders_and_reports_work_on_the_gpu(order: str) -> None:
    """A pass over GPU nodes, run by PyTorch's device thread, is ordered, watched and reported as on the CPU."""
    (module,) = branches(1, 64)
    x = torch.randn(8, 64, device="cuda")
    module(x).square().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    reported: list[Tensor] = []
    profile = scrimp.Profile()
    scrimp.backward(
        module(x).square().sum(),
        order=order,  # type: ignore[arg-type]
        observer=profile,
        on_leaf_grad_ready=lambda leaf, _: reported.append(leaf),
    )
    assert all(torch.equal(p.grad, other) for p, other in zip(module.parameters(), expected, strict=True))
    assert len(reported) == 4
    assert any(run.name == "TanhBackward0" for run in profile.runs)


def test_a_cancelled_pass_over_the_gpu_can_be_run_again() -> None:
    """The error crosses from PyTorch's device thread; a retained graph is as it was."""
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    loss = leaf.sin().sum()
    cancellation = scrimp.Cancellation()
    cancellation.cancel()
    with pytest.raises(scrimp.errors.BackwardCancelledError):
        scrimp.backward(loss, retain_graph=True, observer=cancellation)
    assert leaf.grad is None
    scrimp.backward(loss)
    assert torch.equal(leaf.grad, leaf.cos())


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
