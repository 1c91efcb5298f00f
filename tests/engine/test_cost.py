"""When ``workers="auto"`` uses threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp._engine import cost, workers
from scrimp._engine.cost import Memory, Trial, predicted_seconds, shape_key


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
    trial = Trial()
    for _ in range(5):
        assert not trial.threaded(2)
        run_serially(trial, clock, 20e-6)
    assert not trial.threaded(2)


@pytest.mark.parametrize(("seconds", "settled"), [(20e-6, True), (0.5, False)])
def test_what_will_not_see_a_thread_is_measured_twice(clock: Clock, seconds: float, settled: bool) -> None:
    """Then nothing is left to be learned of short branches; long ones have threads to try."""
    trial = Trial()
    for _ in range(2):
        assert not trial.is_settled(2)
        run_serially(trial, clock, seconds)
    assert trial.is_settled(2) is settled


@pytest.mark.parametrize(("in_threads", "threaded"), [(0.6, True), (1.1, False)])
def test_measurement_overrules_the_prediction(clock: Clock, in_threads: float, threaded: bool) -> None:
    """Long branches try both ways twice, and keep to threads only if these were faster at best."""
    trial = Trial()
    for _ in range(2):
        assert not trial.threaded(2)
        run_serially(trial, clock, 0.5)
    for seconds in (3.0, in_threads):  # the first run of a thread may be slow for reasons of its own
        assert trial.threaded(2)
        with trial.timed():
            clock.taking(seconds)
    assert trial.threaded(2) is threaded


def run_in_threads(trial: Trial, clock: Clock, seconds: float) -> None:
    """A threaded run of a known length."""
    with trial.timed():
        clock.taking(seconds)


def test_threads_that_win_by_a_hair_lose(clock: Clock) -> None:
    """Two runs each say little: a gain of two per cent is none."""
    trial = Trial()
    for _ in range(2):
        run_serially(trial, clock, 0.5)
    for _ in range(2):
        run_in_threads(trial, clock, 0.98)
    assert not trial.threaded(2)


def test_threads_that_became_slow_are_given_up(clock: Clock) -> None:
    """A slow run or two is nothing; when most of the latest took longer than the plain line did, that is run again."""
    trial = Trial()
    for _ in range(2):
        run_serially(trial, clock, 0.5)
    for seconds in (0.6, 0.6, 0.6, 1.3, 1.3):
        run_in_threads(trial, clock, seconds)
        assert trial.threaded(2)
    run_in_threads(trial, clock, 1.3)
    assert not trial.threaded(2)


def test_a_run_that_raises_is_no_measurement(clock: Clock) -> None:
    """However fast it was: threads are tried only after two whole runs one by one."""
    trial = Trial()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trial.timed_one_by_one([lambda: clock.taking(0.5), lambda: 1 / 0])
    run_serially(trial, clock, 0.5)
    assert not trial.threaded(2)


def test_shapes_that_cost_the_same_share_a_trial() -> None:
    """A lambda made anew is the same branch; another shape, dtype or grad mode is another trial."""
    memory = Memory(Trial)

    def key(x: Tensor) -> object:
        return shape_key([lambda x: x, lambda x: x], (x,), 1)

    first = memory.entry(key(torch.ones(2)))
    assert memory.entry(key(torch.zeros(2))) is first
    others = [torch.ones(3), torch.ones(2).double(), torch.ones(2, requires_grad=True)]
    assert all(memory.entry(key(other)) is not first for other in others)


def test_the_memory_of_trials_is_bounded() -> None:
    """Old shapes are forgotten."""
    memory = Memory(Trial)
    first = memory.entry(0)
    for number in range(1, 300):
        memory.entry(number)
    assert memory.entry(0) is not first


def test_a_memory_can_be_asked_from_within_itself() -> None:
    """A collection of garbage that runs in its midst may run a pass that asks for the same shape."""
    inner: list[Trial] = []

    def made() -> Trial:
        if len(inner) < 1:
            inner.append(Trial())
            inner.append(memory.entry(0))
        return Trial()

    memory = Memory(made)
    assert memory.entry(0) is inner[1]
    assert memory.entry(0) is inner[1]


def test_branches_that_draw_random_numbers_stay_serial(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """With ``"auto"`` dropout is that of the plain line in every step, however long it takes."""
    monkeypatch.setattr(workers, "cores", lambda: 2)

    def branch(x: Tensor) -> Tensor:
        clock.taking(1.0)
        return torch.dropout(x, 0.5, train=True)

    x = torch.ones(50)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = [torch.dropout(x, 0.5, train=True) for _ in range(2)]
        torch.manual_seed(seed)
        results = scrimp.parallel([branch, branch], x, threads_per_worker=1)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("number", [0, -1, 2.0, "many"])
def test_other_workers_are_refused(number: object) -> None:
    """A number from one on, or ``"auto"``."""
    with pytest.raises(ValueError, match="auto"):
        scrimp.parallel([torch.sin, torch.cos], torch.ones(1), workers=number)  # type: ignore[arg-type]


def test_auto_gives_the_same_bits_in_threads_and_without(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The first calls are serial, later ones threaded; results and gradients are equal."""
    monkeypatch.setattr(workers, "cores", lambda: 2)
    x = torch.randn(3, 3, requires_grad=True)
    threads: list[set[int]] = []

    def branch(x: Tensor) -> Tensor:
        clock.taking(1.0)
        threads[-1].add(threading.get_ident())
        barrier.wait()
        return torch.tanh(x @ x)

    results = []
    for parties in (1, 1, 2, 2):
        barrier = threading.Barrier(parties, timeout=20)
        threads.append(set())
        x.grad = None
        first, second = scrimp.parallel([branch, lambda x: branch(x) * 2], x, threads_per_worker=1)
        scrimp.backward((first + second).sum())
        results.append((first.detach(), second.detach(), x.grad))
    assert [len(seen) for seen in threads] == [1, 1, 2, 2]
    assert all(len({tensor.sum().item() for tensor in same}) == 1 for same in zip(*results, strict=True))


@pytest.mark.parametrize("cores", [1, 2])
def test_modules_of_one_shape_bring_a_hint(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``"auto"`` says, once for these modules, that stacking is faster; also where there are no cores for threads."""
    monkeypatch.setattr(workers, "cores", lambda: cores)
    x = torch.ones(1, 3)
    same = [nn.Linear(3, 3), nn.Linear(3, 3)]
    with pytest.warns(scrimp.errors.StackableBranchesWarning, match="stack_module_state") as caught:
        scrimp.parallel(same, x, threads_per_worker=1)
    assert caught[0].filename == __file__
    scrimp.parallel(same, x, threads_per_worker=1)


class Scale(nn.Module):
    """A module that prints nothing of its parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        return x * self.weight


SHARED = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "modules",
    [
        [nn.Linear(3, 3), nn.Linear(3, 4)],
        [Scale(1), Scale(3)],
        [SHARED, SHARED],
        [nn.LazyLinear(2), nn.LazyLinear(2)],
        [nn.Linear(3, 3)],
    ],
    ids=["widths", "own parameters", "shared", "lazy", "one"],
)
def test_what_cannot_be_stacked_brings_no_hint(modules: list[nn.Module]) -> None:
    """Modules of several shapes, or that share parameters, or whose shapes are not known yet."""
    assert len(scrimp.parallel(modules, torch.ones(1, 3))) == len(modules)


def test_a_number_of_workers_brings_no_hint() -> None:
    """Whoever says how many threads has decided."""
    scrimp.parallel([nn.Linear(3, 3), nn.Linear(3, 3)], torch.ones(1, 3), workers=2)
