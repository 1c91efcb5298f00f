"""What errors name, what plans do not cover, and what else must not break a limited model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import scrimp
from scrimp.errors import BudgetError

from .steps import MODELS, assert_equal, blocks, gradients, held, measured


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_budget_that_the_error_names_works_from_the_first_step(name: str) -> None:
    """And it is named in the first step; what follows the failed one is as right as ever."""
    torch.manual_seed(0)
    model, make_batch = MODELS[name]()
    batch = make_batch()
    there = batch.nbytes + sum(buffer.nbytes for buffer in model.buffers())

    def step() -> None:
        torch.manual_seed(1)
        model(batch).square().mean().backward()

    peak, plain = measured(step, model) + there, gradients(model)
    session = scrimp.limit(model, there + sum(parameter.nbytes for parameter in model.parameters()) + 1000)
    with pytest.raises(BudgetError, match="forward and backward fit into") as caught:
        step()
    session.detach()
    model.zero_grad()
    budget = caught.value.smallest
    assert budget is not None
    assert budget < peak / 2
    session = scrimp.limit(model, budget)
    for _ in range(3):
        assert measured(step, model) + there <= budget
        assert_equal(gradients(model), plain)
    session.detach()


def test_the_error_names_parameters_gradients_and_logits_by_bytes() -> None:
    """The logits are what stands in the way here."""
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 500))
    tokens = torch.randint(500, (4, 32))
    session = scrimp.limit(model, held(model, torch.optim.SGD(model.parameters())) + 600_000)
    with pytest.raises(BudgetError) as caught:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    session.detach()
    lines = str(caught.value).splitlines()[1:]
    named = {line.split("iB", 1)[1].split("(")[0].strip(): line for line in lines if "iB" in line}
    assert f" {sum(p.nbytes for p in model.parameters()) / 1024:.2f} KiB" in named["parameters"]
    assert "250.00 KiB" in named["aten._log_softmax.default"]


def test_where_no_plan_fits_steps_are_held_under_the_budget_as_they_run() -> None:
    """A graph that is gone through twice cannot be planned below what it holds in between."""
    model, batch = blocks(), torch.randn(96, 48)

    def step() -> None:
        out = model(batch)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()

    peak, plain = measured(step, model) + batch.nbytes, gradients(model)
    session = scrimp.limit(model, int(peak * 0.7))
    for _ in range(3):
        assert measured(step, model) + batch.nbytes <= int(peak * 0.7)
        assert_equal(gradients(model), plain)
        assert session.plan is None
    session.detach()


def test_every_limited_model_counts() -> None:
    """While one runs, the parameters of the other are on the device as well."""
    one, two, batch = blocks(), blocks(3), torch.randn(96, 48)

    def step() -> None:
        one(batch).square().mean().backward()

    peak = measured(step, one, two) + batch.nbytes
    plain = gradients(one)
    budget = int(peak * 0.6)
    sessions = [scrimp.limit(model, budget) for model in (one, two)]
    for _ in range(3):
        assert measured(step, one, two) + batch.nbytes <= budget
        assert_equal(gradients(one), plain)
    for session in sessions:
        session.detach()


def test_a_part_of_the_graph_that_is_let_go_of_at_once() -> None:
    """A generator's graph dies with ``detach``, before backward: planned steps do not hold it up to there either."""
    judge, maker, batch = blocks(), blocks(), torch.randn(96, 48)

    def step() -> None:
        (judge(batch).square().mean() + judge(maker(batch).detach()).abs().mean()).backward()

    peak = measured(step, judge, maker) + batch.nbytes
    plain = gradients(judge)
    budget = int(peak * 0.5)
    sessions = [scrimp.limit(model, budget) for model in (judge, maker)]
    for _ in range(3):
        assert measured(step, judge, maker) + batch.nbytes <= budget
        assert_equal(gradients(judge), plain)
    for session in sessions:
        session.detach()


class Deeper(nn.Module):
    """Runs as many of its blocks as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(8)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        """Go through some of the blocks."""
        return self.blocks[:depth](x)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_step_that_grows_beyond_its_plan_stays_within_the_budget(depth: int) -> None:
    """Whether the plan keeps everything, and so watches next to nothing, or drops."""
    model, batch = Deeper(), torch.randn(96, 48)
    peak = measured(lambda: model(batch, 8).square().mean().backward(), model) + batch.nbytes
    plain = gradients(model)
    budget = int(peak * 0.62)
    session = scrimp.limit(model, budget)
    for now in (depth, depth, depth, depth, 8, 8, 8):
        step = step_of(model, batch, now)
        assert measured(step, model) + batch.nbytes <= budget
        ours = gradients(model)
    assert_equal(ours, plain)
    session.detach()


def step_of(model: nn.Module, batch: Tensor, depth: int) -> Callable[[], object]:
    """Return a step of a depth."""
    return lambda: model(batch, depth).square().mean().backward()


def test_the_first_step_knows_what_a_recurrent_kernel_hands_on_to_backward() -> None:
    """Its workspace is no result that its rule for shapes tells of."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 32, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0]
            return out

    model, batch = Recurrent(), torch.randn(24, 4, 32)

    def step() -> None:
        model(batch).square().mean().backward()

    peak, plain = measured(step, model) + batch.nbytes, gradients(model)
    session = scrimp.limit(model, int(peak * 0.8))
    for _ in range(3):
        assert measured(step, model) + batch.nbytes <= int(peak * 0.8)
        assert_equal(gradients(model), plain)
    session.detach()


def test_the_report_has_the_measured_peak_beside_the_predicted_one() -> None:
    """It is that of the first planned step, counted from end to end."""
    model, batch = blocks(), torch.randn(96, 48)

    def step() -> None:
        model(batch).square().mean().backward()

    peak = measured(step, model) + batch.nbytes
    gradients(model)
    session = scrimp.limit(model, int(peak * 0.6))
    peaks = []
    for _ in range(4):
        peaks.append(measured(step, model) + batch.nbytes)
        gradients(model)
    report = session.report()
    assert report.measured_peak == peaks[1] == peaks[2] == peaks[3]
    assert report.measured_peak <= report.peak <= report.budget
    assert report.measured_peak >= report.peak * 0.99
    assert report.measured_seconds is not None
    assert f"measured {report.measured_peak / 1024:.2f} KiB" in str(report)
    session.detach()


def test_room_to_spare_shows_in_no_prediction() -> None:
    """A budget far above what the step takes leaves the predicted peak what the step takes."""
    model, batch = blocks(), torch.randn(96, 48)
    session = scrimp.limit(model, "8 GiB")
    peaks = []
    for _ in range(2):
        peaks.append(measured(lambda: model(batch).square().mean().backward(), model) + batch.nbytes)
        gradients(model)
    assert session.plan is not None
    assert session.plan.peak == pytest.approx(peaks[1], rel=0.001)
    session.detach()


def test_a_plan_that_keeps_everything_runs_no_dispatch_mode() -> None:
    """It costs what a session costs that keeps everything: a pair of hooks."""
    model, batch = blocks(), torch.randn(96, 48)
    seen: list[int] = []
    model[2].register_forward_hook(lambda *_: seen.append(len(_get_current_dispatch_mode_stack())))
    session = scrimp.limit(model, "1 GiB")
    for _ in range(4):
        model(batch).square().mean().backward()
        gradients(model)
    assert seen[-2:] == [0, 0]
    session.detach()


def test_plans_are_saved_loaded_and_compared(tmp_path: Path) -> None:
    """As JSON; a smaller budget changes decisions."""
    model, batch = blocks(), torch.randn(96, 48)
    peak = measured(lambda: model(batch).square().mean().backward(), model) + batch.nbytes
    gradients(model)
    plans = []
    for part in (0.9, 0.6):
        session = scrimp.limit(model, int(peak * part))
        model(batch).square().mean().backward()
        gradients(model)
        assert session.plan is not None
        plans.append(session.plan)
        session.detach()
    plans[0].save(tmp_path / "plan.json")
    assert scrimp.Plan.load(tmp_path / "plan.json") == plans[0]
    assert plans[0].diff(plans[1])
    assert not plans[0].diff(plans[0])
