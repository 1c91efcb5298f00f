"""Every step of a model within its budget, from the first one on, with the bits of the plain step."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import BudgetError, SessionError
from scrimp.testing import live_bytes

from .steps import MODELS, Trained, activations, assert_nothing_left_on, train, transformer


@functools.cache
def plain(name: str) -> Trained:
    """Return what plain training measures and leaves behind."""
    return train(name)


def assert_same(ours: Trained, other: Trained) -> None:
    """Fail unless two runs left the same bits behind."""
    assert len(ours.tensors) == len(other.tensors)
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors, other.tensors, strict=True))


def assert_within(run: Trained, budget: int) -> None:
    """Fail unless every step of a run stayed within the budget."""
    assert max(run.peaks) <= budget, f"{run.peaks} over {budget}"


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    """See that no test leaves anything on."""
    yield
    assert_nothing_left_on()


def test_the_comparisons_can_fail() -> None:
    """A run over the budget, other bits and a mode that is on are caught."""
    run = plain("transformer")
    with pytest.raises(AssertionError):
        assert_within(run, run.peaks[0] - 1)
    with pytest.raises(AssertionError):
        assert_same(run, Trained(run.peaks, tuple(tensor + 1 for tensor in run.tensors), 0))
    with live_bytes(), pytest.raises(AssertionError):
        assert_nothing_left_on()


@pytest.mark.parametrize("part", [1.0, 0.8, 0.6, 0.45])
@pytest.mark.parametrize("name", MODELS)
def test_within_budget_from_the_first_step(name: str, part: float) -> None:
    """Peaks, optimizer state included, are within parts of the plain peak, and the bits are those of plain training."""
    most = max(plain(name).peaks)
    budget = plain(name).resident + int((most - plain(name).resident) * part)
    run = train(name, budget)
    assert_within(run, budget)
    assert_same(run, plain(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_down_to_the_smallest_budget(name: str) -> None:
    """The smallest budget that the error names is one that works."""
    with pytest.raises(BudgetError) as caught:
        train(name, plain(name).resident + 1000)
    assert caught.value.smallest is not None
    model, make_batch = MODELS[name]()
    trace = scrimp.trace(lambda x: model(x).square().mean(), make_batch())
    smallest = scrimp.frontier(trace, points=2)[0].peak - sum(part.nbytes for part in trace.resident)
    budget = plain(name).resident + smallest
    for step in range(8):
        run = train(name, budget + (max(plain(name).peaks) - budget) * step // 7)
        assert_within(run, budget + (max(plain(name).peaks) - budget) * step // 7)
        assert_same(run, plain(name))


def test_an_impossible_budget_says_what_stands_in_the_way() -> None:
    """The error names bytes that are needed, and the largest things; the model is as usable as before."""
    model, make_batch = transformer()
    session = scrimp.limit(model, sum(parameter.nbytes for parameter in model.parameters()) + 20_000)
    with pytest.raises(BudgetError, match=r"(?s)need .* have a budget of .*parameters"):
        model(make_batch()).sum().backward()
    session.detach()
    model(make_batch()).sum().backward()


def test_a_budget_for_activations_alone() -> None:
    """What was there before, and the parameters' gradients, do not count."""
    model, batch, budget = activations(0.6)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    session = scrimp.limit(model, activations=budget)
    for _ in range(3):
        with live_bytes() as count:
            model(batch).square().mean().backward()
        assert count.peak <= budget + gradients
        model.zero_grad()
    session.detach()


def test_steps_after_the_first_follow_a_plan() -> None:
    """Nothing is evicted any more, and fewer operators run again than the plan has drops to make up for."""
    model, batch, budget = activations(0.6)
    session = scrimp.limit(model, activations=budget)
    for _ in range(4):
        model(batch).square().mean().backward()
        model.zero_grad()
        evicted = session.statistics.evicted.total
    plan = session.plan
    assert plan is not None
    assert plan.peak <= plan.budget
    model(batch).square().mean().backward()
    assert session.statistics.evicted.total == evicted
    assert session.statistics.kept.bytes == 0
    session.detach()


def test_evaluation_is_untouched() -> None:
    """Without gradients the model's forward runs as it is, and nothing is learnt from it."""
    model, batch, budget = activations(0.6)
    session = scrimp.limit(model, activations=budget)
    torch.manual_seed(0)
    with torch.no_grad():
        ours = model(batch)
    assert session.plan is None
    assert session.statistics.made.total == 0
    session.detach()
    torch.manual_seed(0)
    assert torch.equal(ours, model(batch))


def test_hooks_of_modules_fire_once() -> None:
    """In the recorded step as in planned ones."""
    model, batch, budget = activations(0.5)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    session = scrimp.limit(model, activations=budget)
    for step in range(1, 4):
        model(batch).square().mean().backward()
        assert len(calls) == step
    session.detach()


def test_a_new_batch_size_is_planned_anew() -> None:
    """And both plans are there afterwards."""
    model, batch, budget = activations(0.6)
    session = scrimp.limit(model, activations=budget)
    seen = []
    for size in (4, 4, 2, 2, 4, 2):
        model(batch[:size]).square().mean().backward()
        model.zero_grad()
        plan = session.plan
        assert plan is not None
        seen.append(plan.fingerprint)
    assert seen[0] == seen[1] == seen[4]
    assert seen[2] == seen[3] == seen[5] != seen[0]
    session.detach()


class Moody(nn.Module):
    """Runs another operator when told so, by something that is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, _ = transformer(3)
        self.mood = False

    def forward(self, x: Tensor) -> Tensor:
        """Depend on the mood, early on."""
        x = torch.tanh(x) if self.mood else torch.sin(x)
        return self.body(x)


def test_a_step_that_departs_from_its_plan_goes_on_within_the_budget() -> None:
    """It gives the plain gradients, and the next one of its kind is planned."""
    torch.manual_seed(0)
    model, batch = Moody(), torch.randn(4, 24, 32)
    with live_bytes() as count:
        model(batch).square().mean().backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    budget = int((count.peak - gradients) * 0.7)
    session = scrimp.limit(model, activations=budget)
    for mood in (False, False, True, True, True):
        model.mood = mood
        model.zero_grad()
        torch.manual_seed(1)
        with live_bytes() as count:
            model(batch).square().mean().backward()
        assert count.peak <= budget + gradients
        ours = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        torch.manual_seed(1)
        type(model).forward(model, batch).square().mean().backward()
        plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    session.detach()


class Failing(Moody):
    """Raises when told so."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail in the middle."""
        x = self.body(x)
        if self.mood:
            raise ValueError("no mood")
        return x


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_exception_in_forward_leaves_nothing_on(steps_before: int) -> None:
    """Whether the step was being recorded or planned; the next step is right."""
    model, batch = Failing(), torch.randn(4, 24, 32)
    session = scrimp.limit(model, activations="600 kB")
    for _ in range(steps_before):
        model(batch).square().mean().backward()
    model.mood = True
    with pytest.raises(ValueError, match="no mood"):
        model(batch)
    assert_nothing_left_on()
    model.mood = False
    model(batch).square().mean().backward()
    session.detach()


def test_limiting_twice_and_nothing_is_refused() -> None:
    """With errors that say what to do instead."""
    model, _ = transformer(1)
    session = scrimp.limit(model, "1 GiB")
    with pytest.raises(SessionError, match="limited already"):
        scrimp.limit(model, "1 GiB")
    session.detach()
    assert "forward" not in model.__dict__
    with pytest.raises(SessionError, match="need a module"):
        scrimp.limit(lambda: None, "1 GiB")  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="either a budget"):
        scrimp.limit(model)
    with pytest.raises(SessionError, match="run a step"):
        scrimp.limit(model, "1 GiB").report()


def test_the_report_explains_the_plan() -> None:
    """Predicted and measured time, where the peak is, what is kept and dropped by operator and kind of module."""
    model, batch, budget = activations(0.6)
    session = scrimp.limit(model, activations=budget)
    for _ in range(3):
        model(batch).square().mean().backward()
        model.zero_grad()
    report = session.report()
    text = str(report)
    assert report.peak <= report.budget < report.plain_peak
    assert report.measured_steps
    assert "the peak is" in text
    assert "*.perceptron.*" in text
    assert sum(row.dropped for row in report.rows) > 0
    session.detach()


def test_code_that_is_no_module() -> None:
    """A session with a budget, entered in every step, does the same for any code."""
    model, batch, budget = activations(0.6)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    session = scrimp.session(activations=budget + gradients)
    for _ in range(3):
        with live_bytes() as count:
            with session:
                loss = model(batch).square().mean()
            loss.backward()
        assert count.peak <= budget + gradients
        model.zero_grad()
    assert session.plan is not None
    assert session.report().peak <= session.report().budget


def test_a_session_with_a_budget_is_entered_once_at_a_time() -> None:
    """Errors say so."""
    session = scrimp.session("1 GiB")
    with session, pytest.raises(SessionError, match="open already"), session:
        pass
    with session, pytest.raises(SessionError, match="whole step"), scrimp.session("1 GiB"):
        pass
    with pytest.raises(SessionError, match="not open"):
        session.__exit__(None, None, None)


def test_a_model_that_is_moved_after_it_was_limited_is_known_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is for the device that the model is on when it is called."""
    model, make_batch = transformer()
    session = scrimp.limit(model, "1GiB")
    model(make_batch()).square().mean().backward()
    assert session.trace is not None
    elsewhere = torch.device("meta")
    monkeypatch.setattr("scrimp._budget_session.device_of", lambda module, tree: elsewhere)
    model.to(elsewhere)
    seen = []

    def look(_model: object, device: torch.device) -> None:
        seen.append(device)
        raise ZeroDivisionError  # nothing can be limited there

    monkeypatch.setattr("scrimp._limited._state", look)
    with pytest.raises(ZeroDivisionError):
        model(make_batch().to(elsewhere))
    assert seen == [session.device] == [elsewhere]
    assert session.trace is None
    session.detach()
