"""Long loops on a GPU have the bits of the plain loop, and its memory is what the schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import LoopError
from scrimp.testing import Step, assert_same_outcome


def plain(step: Any, state: Any, xs: Tensor, **_: Any) -> Any:
    """The loop written plainly."""
    outputs = []
    for x in xs.unbind(0):
        state, y = step(state, x)
        outputs.append(y)
    return state, torch.stack(outputs)


@pytest.mark.parametrize("slots", [1, 3, 50])
@pytest.mark.parametrize("amp", [False, True])
def test_bits_are_those_of_the_plain_loop(slots: int, amp: bool) -> None:
    """Dropout, batch norm, a generator of one's own and autocast."""

    def make(scan: Any) -> Step:
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh()).cuda()
        generator = torch.Generator("cuda").manual_seed(5)
        h, xs = torch.randn(8, 16, device="cuda", requires_grad=True), torch.randn(12, 8, 16, device="cuda")

        def step(h: Tensor, x: Tensor) -> Any:
            h = model(h + x).float() + 0.1 * torch.rand(h.shape, device="cuda", generator=generator)
            return h, h.mean()

        def forward() -> Any:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp, cache_enabled=False):
                return scan(step, h, xs, slots=slots)

        return Step(forward, state=(model, h), generators=[generator])

    assert_same_outcome(lambda: make(plain), lambda: make(scrimp.scan))


def test_peak_does_not_grow_with_the_length() -> None:
    """Twice the steps take no more memory, but for a few numbers."""

    def peak(length: int) -> int:
        w, h = torch.ones(1 << 20, device="cuda", requires_grad=True), torch.ones(1 << 20, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        last, _ = scrimp.scan(lambda h, _: ((h * w).sin(), None), h, length=length, slots=4)
        last.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    shortest = peak(40)
    assert abs(peak(80) - shortest) < 1 << 14
    assert abs(peak(160) - shortest) < 1 << 14


def test_a_stream_of_ones_own() -> None:
    """Forward and backward on a side stream."""

    def make(scan: Any) -> Step:
        w, xs = torch.randn(1 << 16, device="cuda", requires_grad=True), torch.randn(20, 1 << 16, device="cuda")

        def forward() -> Any:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results = scan(lambda h, x: ((h * w + x).sin(), h.sum()), torch.zeros_like(xs[0]), xs, slots=3)
            torch.cuda.current_stream().wait_stream(stream)
            return results

        return Step(forward, state=w)

    assert_same_outcome(lambda: make(plain), lambda: make(scrimp.scan))


def test_a_module_switched_before_backward() -> None:
    """Sums and norms of the last step's results give away that it did something else."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    h, _ = scrimp.scan(lambda h, _: (model(h).sin(), None), torch.ones(8, 64, device="cuda"), length=6, slots=2)
    model.eval()
    with pytest.raises(LoopError, match="something else"):
        h.sum().backward()


def test_results_that_kernels_add_up_in_any_order_pass() -> None:
    """Scattered additions differ in their last bits from run to run, which is no error."""
    w, places = torch.ones(4096, device="cuda", requires_grad=True), torch.randint(16, (4096,), device="cuda")

    def step(h: Tensor, _: None) -> Any:
        return torch.zeros(16, device="cuda").index_add(0, places, h[places] * w).tanh(), None

    h, _ = scrimp.scan(step, torch.rand(16, device="cuda"), length=6, slots=2)
    h.sum().backward()
    assert w.grad is not None
