"""``scrimp.scan`` keeps what its budget says, runs as many steps as its schedule says, and leaves nothing."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp._loops.schedule import advances, slots_for
from scrimp.errors import BudgetError
from scrimp.testing import live_bytes

STATE = 4 * 1000


class Heat(nn.Module):
    """One explicit step of a heat equation, with a conductivity to learn."""

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.conductivity = nn.Parameter(torch.full((cells,), 0.2))

    def forward(self, u: Tensor, _: None) -> tuple[Tensor, None]:
        """One step."""
        return u + self.conductivity * (u.roll(1) - 2 * u + u.roll(-1)), None


def peak_of(length: int, **ways: Any) -> int:
    """The most bytes that were alive in forward and backward, beside those of the loop's arguments."""
    model, u = Heat(1000), torch.rand(1000)
    with live_bytes() as count:
        last, _ = scrimp.scan(model, u, length=length, **ways)
        last.square().sum().backward()
        del last
        model.conductivity.grad = None
    assert count.now == 0
    return count.peak


def test_the_peak_does_not_grow_with_the_length() -> None:
    """With as many slots, twice the steps need not a byte more."""
    assert peak_of(60, slots=4) == peak_of(120, slots=4) == peak_of(240, slots=4)


def test_each_slot_costs_one_state() -> None:
    """The peak is that of one step, and one state for each slot beside the first, which the caller has."""
    peaks = [peak_of(200, slots=slots) for slots in (2, 3, 5, 9)]
    assert [later - peaks[0] for later in peaks] == [0, STATE, 3 * STATE, 7 * STATE]


@pytest.mark.parametrize("until", [None, lambda u: False], ids=["known", "unknown"])
def test_a_budget_in_bytes_holds(until: Any) -> None:
    """Kept states have no more bytes than the budget, forward and backward: with more, the peak grows by just that."""
    one = peak_of(100, budget=STATE, until=until)
    assert peak_of(100, budget=STATE + 10, until=until) == one
    assert peak_of(100, budget="40kB", until=until) <= one + 9 * STATE


def test_a_budget_under_one_state_is_refused() -> None:
    """The error says how much one state takes."""
    with pytest.raises(BudgetError) as caught:
        peak_of(10, budget=STATE - 1)
    assert caught.value.smallest == STATE


@pytest.mark.parametrize("until", [None, lambda _: False], ids=["known", "unknown"])
@pytest.mark.parametrize("budget", [4_000, 9_000, 60_000])
def test_states_that_grow_stay_within_the_budget(budget: int, until: Any) -> None:
    """Fewer of them are kept then, forward and backward."""
    w = torch.ones(1, requires_grad=True)

    def peak(**ways: Any) -> int:
        with live_bytes() as count:
            last, _ = scrimp.scan(
                lambda h, _: (torch.cat([h, (h[-1:] * w).sin().expand(10)]), None), torch.ones(10), length=60, **ways
            )
            last.sum().backward()
        return count.peak

    assert peak(budget=budget, until=until) - peak(slots=1) <= budget


def test_a_budget_for_more_states_than_steps() -> None:
    """A large budget is no more than a limit, whatever sizes states have."""
    w = torch.ones(1, requires_grad=True)
    last, _ = scrimp.scan(lambda h, _: (torch.cat([h, h[-1:] * w]), None), torch.ones(1), length=9, budget="1 MB")
    last.sum().backward()
    assert w.grad is not None


def test_python_objects_do_not_grow_with_the_length() -> None:
    """Nor does what is remembered beside tensors, such as the generators that steps draw from."""
    w, generator = torch.ones(3, requires_grad=True), torch.Generator().manual_seed(1)

    def objects(length: int) -> int:
        tracemalloc.start()
        try:
            last, _ = scrimp.scan(
                lambda h, _: ((h * w + torch.rand(3, generator=generator)).sin(), None), torch.ones(3),
                length=length, slots=3,
            )  # fmt: skip
            last.sum().backward()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    objects(10)
    assert objects(400) <= objects(100) + 150_000  # 300 states of the generator would have 1.5 MB


def test_a_state_that_grows_over_the_budget_is_refused() -> None:
    """The budget holds for states of any size."""
    with pytest.raises(BudgetError):
        scrimp.scan(lambda h, _: (torch.cat([h, h]), None), torch.ones(2, requires_grad=True), length=9, budget=64)


@pytest.mark.parametrize(("length", "slots"), [(50, 7), (30, 1), (100, 3), (9, 9), (40, None)])
def test_steps_run_as_often_as_the_schedule_says(length: int, slots: int | None) -> None:
    """Once forward, once to be differentiated, and the optimum in between; progress counts them."""
    calls = 0
    seen: list[scrimp.Progress] = []
    w = torch.ones(3, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        nonlocal calls
        calls += 1
        return (h * w).sin(), None

    h, _ = scrimp.scan(step, torch.ones(3), length=length, slots=slots, progress=seen.append)
    assert calls == length
    h.sum().backward()
    expected = advances(length, slots or slots_for(length, 2)) + 1 + length
    assert calls == expected
    assert [one.done for one in seen] == [*range(1, length + 1), *range(1, length + 1)]
    assert {one.total for one in seen} == {length}
    assert [one.phase for one in seen] == [scrimp.Phase.FORWARD] * length + [scrimp.Phase.BACKWARD] * length
    assert seen[-1].repeated == expected - length


def test_no_cycles() -> None:
    """Memory goes by reference counting, without the garbage collector, used or not."""
    model, u = Heat(1000), torch.rand(1000)
    gc.collect()
    gc.disable()
    try:
        with live_bytes() as count:
            last, _ = scrimp.scan(model, u, length=20, slots=3)
            del last
            assert count.now == 0
            last, _ = scrimp.scan(model, u, length=20, slots=3)
            last.sum().backward(retain_graph=True)
            model.conductivity.grad = None
            once = count.now
            last.sum().backward(retain_graph=True)
            model.conductivity.grad = None
            assert count.now == once
            del last
            assert count.now == 0
    finally:
        gc.enable()


def test_what_a_session_would_keep_is_not_kept() -> None:
    """Inside a session, a loop keeps what it keeps outside of one."""
    model, u = Heat(1000), torch.rand(1000)
    with live_bytes() as count, scrimp.session(scrimp.policy.Online(1 << 30)):
        last, _ = scrimp.scan(model, u, length=100, slots=3)
        assert count.now <= 5 * STATE
        last.sum().backward()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_steps() -> None:
    """A small RNN over 10⁵ steps: the peak is that of the first thousand, to the byte."""
    w, start = torch.randn(16, 16) / 8, torch.rand(16)
    w.requires_grad_()

    def peak(length: int) -> int:
        with live_bytes() as count:
            last, _ = scrimp.scan(lambda h, _: (torch.mv(w, h).tanh_(), None), start, length=length, slots=450)
            last.sum().backward()
            w.grad = None
            del last
        assert count.now == 0
        return count.peak

    assert peak(100_000) == peak(1_000)
