"""When ``workers="auto"`` uses threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp._engine import cost, parallel
from scrimp._engine.cost import Costs, Trial, predicted_seconds, shape_key


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """The time."""
        return self.now

    def taking(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the cost model reads."""
    clock = Clock()
    monkeypatch.setattr(cost, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("tasks", "workers", "seconds"),
    [([1.0, 1.0, 1.0], 2, 2.0), ([3.0, 1.0, 1.0], 2, 3.0), ([1.0] * 4, 4, 1.0)],
)
def test_the_model_gives_each_task_to_who_is_free_first(tasks: list[float], workers: int, seconds: float) -> None:
    """The prediction is the longest worker's time, plus the threads'."""
    overhead = predicted_seconds([0.0], workers)
    assert predicted_seconds(tasks, workers) == pytest.approx(seconds + overhead)


def run_serially(trial: Trial, clock: Clock, seconds: float) -> None:
    """Two tasks of a known length."""
    trial.timed_one_by_one([lambda: clock.taking(seconds)] * 2)


def test_short_branches_never_see_a_thread(clock: Clock) -> None:
    """Where the threads cost more than they save, everything stays serial."""
    trial = Trial(2)
    assert not trial.threaded
    run_serially(trial, clock, 20e-6)
    assert not trial.threaded


@pytest.mark.parametrize(("in_threads", "threaded"), [(0.6, True), (1.1, False)])
def test_measurement_overrules_the_prediction(clock: Clock, in_threads: float, threaded: bool) -> None:
    """Long branches try threads once, and keep them only if these were faster."""
    trial = Trial(2)
    run_serially(trial, clock, 0.5)
    assert trial.threaded
    with trial.timed():
        clock.taking(in_threads)
    assert trial.threaded is threaded


def test_shapes_that_cost_the_same_share_a_trial() -> None:
    """A lambda made anew is the same branch; another shape, dtype or grad mode is another trial."""
    costs = Costs()

    def key(x: Tensor) -> object:
        return shape_key([lambda x: x, lambda x: x], (x,), 1)

    first = costs.trial(key(torch.ones(2)), 2)
    assert costs.trial(key(torch.zeros(2)), 2) is first
    others = [torch.ones(3), torch.ones(2).double(), torch.ones(2, requires_grad=True)]
    assert all(costs.trial(key(other), 2) is not first for other in others)


def test_the_memory_of_trials_is_bounded() -> None:
    """Old shapes are forgotten."""
    costs = Costs()
    first = costs.trial(0, 2)
    for number in range(1, 300):
        costs.trial(number, 2)
    assert costs.trial(0, 2) is not first


def test_auto_gives_the_same_bits_in_threads_and_without(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The first call is serial, the second threaded; results and gradients are equal."""
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    x = torch.randn(3, 3, requires_grad=True)
    threads: list[set[int]] = []

    def branch(x: Tensor) -> Tensor:
        clock.taking(1.0)
        threads[-1].add(threading.get_ident())
        barrier.wait()
        return torch.tanh(x @ x)

    results = []
    for parties in (1, 2):
        barrier = threading.Barrier(parties, timeout=20)
        threads.append(set())
        x.grad = None
        first, second = scrimp.parallel([branch, lambda x: branch(x) * 2], x, threads_per_worker=1)
        scrimp.backward((first + second).sum())
        results.append((first.detach(), second.detach(), x.grad))
    assert [len(seen) for seen in threads] == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_modules_of_one_shape_bring_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """``"auto"`` says once that stacking is faster; different modules bring none."""
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    x = torch.ones(1, 3)
    same = [nn.Linear(3, 3), nn.Linear(3, 3)]
    with pytest.warns(scrimp.errors.StackableBranchesWarning, match="stack_module_state"):
        scrimp.parallel(same, x, threads_per_worker=1)
    scrimp.parallel(same, x, threads_per_worker=1)
    scrimp.parallel([nn.Linear(3, 3), nn.Linear(3, 4)], x, threads_per_worker=1)
