"""What errors name, what plans do not cover, and what else must not break a limited model."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import scrimp
from scrimp.errors import BudgetError
from scrimp.testing import live_bytes

from .steps import MODELS, held, transformer


def blocks(count: int = 6, width: int = 48) -> nn.Sequential:
    """Return a stack of simple blocks, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(count))
    )


def measured(step: Callable[[], object], *held_by: nn.Module) -> int:
    """Return the peak of a step: what modules hold, without gradients, and live bytes."""
    with live_bytes() as count:
        step()
    return count.peak + sum(tensor.nbytes for module in held_by for tensor in module.parameters())


def gradients(*modules: nn.Module) -> list[Tensor]:
    """Return copies of all gradients, and clear them."""
    found = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return found


def assert_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    """Fail unless all are the same to the last bit."""
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


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


def test_after_a_step_that_did_not_fit_others_are_steps_of_their_own() -> None:
    """Even if the graph of the failed one is still there, and nobody detached its session."""
    model, other, batch = blocks(), blocks(), torch.randn(96, 48)
    peak = measured(lambda: other(batch).square().mean().backward(), other) + batch.nbytes
    plain = gradients(other)
    failing = scrimp.limit(model, int(peak * 0.35))
    loss = model(batch).square().mean()
    with pytest.raises(BudgetError):
        loss.backward()
    model.zero_grad()
    session = scrimp.limit(other, int(peak * 0.9))
    for _ in range(3):
        other(batch).square().mean().backward()
        assert_equal(gradients(other), plain)
    assert session.plan is not None
    for one in (session, failing):
        one.detach()


def test_a_model_whose_backward_fails_goes_with_its_last_owner() -> None:
    """An error in the middle of a node of the first backward pass leaves no cycle through the graph behind."""

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch._C._current_graph_task_id() != -1 and func is torch.ops.aten.mm.default:
                raise ZeroDivisionError
            return func(*args, **(kwargs or {}))

    def fail() -> weakref.ref[nn.Module]:
        model, make_batch = transformer()
        session = scrimp.limit(model, "1GiB")
        loss = model(make_batch()).square().mean()
        with Failing(), pytest.raises(ZeroDivisionError):
            loss.backward()
        session.detach()
        return weakref.ref(model)

    model = fail()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("fails", [True, False])
def test_after_backward_no_other_model_is_held_on_to(fails: bool) -> None:
    """What a plain model saves after a limited step, one that failed in backward or not, goes with its graph."""
    model, make_batch = transformer()
    session = scrimp.limit(model, "1GiB")
    loss = model(make_batch()).square().mean()
    if fails:
        next(model.parameters()).register_hook(lambda _gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    del loss
    other, batch = transformer()[0], make_batch()
    standing = []
    for _ in range(3):
        with live_bytes() as count:
            other(batch).square().mean().backward()
        other.zero_grad()
        gc.collect()
        standing.append(count.now)
    session.detach()
    assert standing == [0, 0, 0]


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


def test_a_limited_model_that_is_forgotten_is_gone() -> None:
    """It does not wait for the garbage collector, and counts for others no more."""
    model = blocks()
    scrimp.limit(model, "1 GiB")
    ref = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()


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


def test_copies_of_a_limited_model_are_models_of_their_own() -> None:
    """By ``copy.deepcopy`` and through a file; they are not limited, and call themselves."""
    model, batch = blocks(), torch.randn(4, 48)
    session = scrimp.limit(model, "1 GiB")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(other(batch), model(batch))
            for parameter in other.parameters():
                parameter.zero_()
            assert not torch.equal(other(batch), model(batch))
        scrimp.limit(other, "1 GiB").detach()
    session.detach()


def test_a_limited_model_that_is_interrupted_in_backward_goes_on() -> None:
    """A step that ends with ``KeyboardInterrupt`` leaves nothing on, and the next ones have the right bits."""
    model, batch = blocks(), torch.randn(96, 48)
    peak = measured(lambda: model(batch).square().mean().backward(), model) + batch.nbytes
    plain = gradients(model)
    session = scrimp.limit(model, int(peak * 0.6))

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    for interrupted in (True, False, True, False, False):
        out = model(batch)
        handle = out.register_hook(interrupt) if interrupted else None
        try:
            out.square().mean().backward()
        except KeyboardInterrupt:
            assert handle is not None
            gradients(model)
        else:
            assert_equal(gradients(model), plain)
        del out
    session.detach()
    assert not _get_current_dispatch_mode_stack()


def test_loaded_weights_and_another_type_go_on() -> None:
    """Plans are for shapes and types, not for contents."""
    model, make_batch = transformer(2)
    batch = make_batch()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    session = scrimp.limit(model, "1 GiB")
    for _ in range(2):
        model(batch).square().mean().backward()
        gradients(model)
    model.load_state_dict(state)
    model.double()
    for _ in range(2):
        torch.manual_seed(1)
        model(batch.double()).square().mean().backward()
        ours = gradients(model)
    session.detach()
    torch.manual_seed(1)
    model(batch.double()).square().mean().backward()
    assert_equal(ours, gradients(model))
