"""Traces of real steps, and plans carried out: what is predicted is what is measured."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp.errors import BudgetError, PolicyError, TraceError
from scrimp.planning import Decision, Drop, Keep, Plan, Run, Store, Trace, Unpack, simulate
from scrimp.policy import KeepAll, Planned, Policy
from scrimp.testing import live_bytes


class Attention(nn.Module):
    """A transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.perceptron = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        q, k, v = (part.view(4, 24, 4, 8).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), 0.1)
        return x + F.dropout(self.perceptron(x), 0.1)


class Residual(nn.Module):
    """Convolutions, batch norm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """Add, normalise, activate in place."""
        return F.relu_(self.norm(self.body(x) + x))


class Pyramid(nn.Module):
    """Down, up, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """One level."""
        skip = F.silu(self.down(x))
        low = F.silu(self.bottom(F.max_pool2d(skip, 2)))
        return self.merge(torch.cat([skip, self.up(low)], 1))


class Recurrent(nn.Module):
    """A gated cell, unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Run over the sequence."""
        state = x[0]
        for part in x:
            state = self.cell(part, state)
        return state


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": lambda: (nn.Sequential(*(Attention() for _ in range(3))), torch.randn(4, 24, 32)),
    "resnet": lambda: (nn.Sequential(*(Residual() for _ in range(3))), torch.randn(2, 8, 16, 16)),
    "u-net": lambda: (nn.Sequential(*(Pyramid() for _ in range(2))), torch.randn(2, 8, 16, 16)),
    "recurrent": lambda: (Recurrent(), torch.randn(12, 4, 16)),
}


class Case:
    """A step that can be run over and over with the same data and draws."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.x = CASES[name]()
        self.before = {key: value.clone() for key, value in self.model.state_dict().items()}

    def loss(self) -> Tensor:
        """The forward pass."""
        result: Tensor = self.model(self.x).square().mean()
        return result

    def measured(self, policy: Policy) -> tuple[int, list[Tensor]]:
        """Run a step under a policy; return its peak and the gradients."""
        self.model.load_state_dict(self.before)
        self.model.zero_grad()
        torch.manual_seed(1)
        with live_bytes() as count:
            with scrimp.session(policy):
                loss = self.loss()
            loss.backward()
        return count.peak, [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each of the models in turn."""
    return Case(request.param)


def traced(case: Case) -> tuple[Trace, int]:
    """Return the trace of a step, and how many bytes were there before it."""
    trace = scrimp.trace(case.loss)
    case.model.zero_grad()
    return trace, sum(part.nbytes for part in trace.resident)


def assert_as_predicted(case: Case, policy: Policy, predicted: int, plain: list[Tensor]) -> None:
    """Fail unless a step takes the predicted bytes, to 0.1%, and gives the bits of the plain one."""
    peak, gradients = case.measured(policy)
    assert not (isinstance(policy, Planned) and policy.departed)
    assert abs(peak - predicted) <= predicted * 0.001, f"predicted {predicted}, measured {peak}"
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_the_comparison_can_fail() -> None:
    """A wrong prediction and a wrong gradient are both caught."""
    case = Case("transformer")
    peak, gradients = case.measured(KeepAll())
    assert_as_predicted(case, KeepAll(), peak, gradients)
    with pytest.raises(AssertionError, match="predicted"):
        assert_as_predicted(case, KeepAll(), peak * 2, gradients)
    with pytest.raises(AssertionError):
        assert_as_predicted(case, KeepAll(), peak, [gradient + 1 for gradient in gradients])


def test_peak_of_the_plain_step(case: Case) -> None:
    """A trace knows the peak of the step that it was made from."""
    trace, resident = traced(case)
    peak, gradients = case.measured(KeepAll())
    assert_as_predicted(case, KeepAll(), simulate(trace).peak - resident, gradients)
    assert peak == simulate(trace).peak - resident


def test_plans_along_the_frontier(case: Case) -> None:
    """From the smallest feasible budget upwards, the measured peak is the planned one, within the budget."""
    trace, resident = traced(case)
    _, plain = case.measured(KeepAll())
    for plan in scrimp.frontier(trace, points=5):
        assert plan.peak <= plan.budget
        assert_as_predicted(case, Planned(trace, plan), plan.peak - resident, plain)


@pytest.mark.parametrize("seed", range(4))
def test_random_plans(case: Case, seed: int) -> None:
    """Any mixture of kept and dropped values, some passed over by the first replays, takes what is simulated."""
    trace, resident = traced(case)
    _, plain = case.measured(KeepAll())
    generator = random.Random(seed)
    full = scrimp.plan(trace, simulate(trace).peak)
    chosen = {
        value: Drop() if generator.random() < 0.5 and _droppable(trace, value) else Keep() for value in full.decisions
    }
    peak = simulate(trace, chosen).peak
    plan = Plan(trace.fingerprint(), peak, chosen, peak, 0.0, 0.0, 0.0)
    assert_as_predicted(case, Planned(trace, plan), peak - resident, plain)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [False, True], ids=["in time", "ahead"])
def test_random_plans_with_a_store(case: Case, seed: int, early: bool) -> None:
    """Values leave after the planned operator, and come back when they are needed, or ahead but never too early."""
    trace, resident = traced(case)
    trace = dataclasses.replace(trace, out_bandwidth=1e9, in_bandwidth=1e9)
    _, plain = case.measured(KeepAll())
    chosen = random_stores(trace, random.Random(seed), early)
    peak = simulate(trace, chosen).peak
    host = scrimp.store.Host()
    policy = Planned(trace, Plan(trace.fingerprint(), peak, chosen, peak, 0.0, 0.0, 0.0), host)
    if not early:
        assert_as_predicted(case, policy, peak - resident, plain)
    measured, gradients = case.measured(policy)
    assert measured <= (peak - resident) * 1.001
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
    assert host.statistics.held.total >= sum(isinstance(decision, Store) for decision in chosen.values()) > 0
    assert host.statistics.held.bytes == 0


def random_stores(trace: Trace, generator: random.Random, early: bool) -> dict[int, Decision]:
    """Store some values that share their storage with no other, drop some, keep the rest."""
    saved: dict[int, int] = {}
    for number, op in enumerate(trace.ops):
        for value in op.saves:
            saved.setdefault(value, number)
    unpacked = {
        event.value: number for number, event in reversed(list(enumerate(trace.events))) if isinstance(event, Unpack)
    }
    chosen: dict[int, Decision] = {}
    for value in scrimp.plan(trace, simulate(trace).peak).decisions:
        draw = generator.random()
        chosen[value] = Keep()
        if draw < 0.35 and value in unpacked and trace.values[value].overwrites is None:
            free_at = min(saved[value] + generator.randrange(10), len(trace.ops) - 1)
            fetch_at = unpacked[value] - (generator.randrange(40) if early else 0)
            chosen[value] = Store(free_at, max(0, fetch_at))
        elif draw < 0.6 and _droppable(trace, value):
            chosen[value] = Drop(generator.randrange(2))
    return chosen


def test_a_plan_that_stores_needs_a_store() -> None:
    """The policy says so when it is made."""
    trace, _ = traced(Case("resnet"))
    plan = scrimp.plan(trace, 1 << 40)
    storing = dataclasses.replace(plan, decisions={value: Store(0, 0) for value in plan.decisions})
    with pytest.raises(PolicyError, match="need a store"):
        Planned(trace, storing)


def _droppable(trace: Trace, value: int) -> bool:
    op = trace.values[value].op
    if op is None or not trace.ops[op].replayable:
        return False
    try:
        simulate(trace, {value: Drop()})
    except scrimp.errors.PlanError:
        return False
    return True


def test_an_impossible_budget_names_the_smallest(case: Case) -> None:
    """And that one works."""
    trace, resident = traced(case)
    with pytest.raises(BudgetError) as caught:
        scrimp.plan(trace, resident + 1)
    assert caught.value.smallest is not None
    plan = scrimp.plan(trace, caught.value.smallest)
    _, plain = case.measured(KeepAll())
    assert_as_predicted(case, Planned(trace, plan), plan.peak - resident, plain)


def test_trace_and_plan_through_files(tmp_path: Path) -> None:
    """What was written on one machine is planned and carried out on another."""
    case = Case("transformer")
    trace, resident = traced(case)
    trace.save(tmp_path / "trace.json")
    budget = resident + int((simulate(trace).peak - resident) * 0.7)
    plan = scrimp.plan(Trace.load(tmp_path / "trace.json"), budget)
    plan.save(tmp_path / "plan.json")
    policy = Planned(trace, Plan.load(tmp_path / "plan.json"))
    _, plain = case.measured(KeepAll())
    assert_as_predicted(case, policy, plan.peak - resident, plain)
    assert not policy.departed


def test_a_step_that_departs_from_its_plan_stays_right() -> None:
    """Another batch size: from the first value that differs on, everything is kept."""
    case = Case("resnet")
    trace, _ = traced(case)
    policy = Planned(trace, scrimp.frontier(trace, points=2)[0])
    case.x = torch.randn(3, 8, 16, 16)
    _, plain = case.measured(KeepAll())
    _, ours = case.measured(policy)
    assert policy.departed
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_plan_for_another_trace_is_refused() -> None:
    """Plans carry the fingerprint of their trace."""
    first, second = traced(Case("resnet"))[0], traced(Case("u-net"))[0]
    with pytest.raises(PolicyError, match="for another"):
        Planned(first, scrimp.plan(second, 1 << 40))


def test_tracing_leaves_a_module_as_it_was() -> None:
    """Buffers, gradients and random state are those from before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1), nn.Flatten(0))
    model[0].weight.grad = torch.ones(4, 4)
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    x = torch.randn(1, 4).expand(8, 4)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.model(x).square().mean()
            return result

    torch.set_rng_state(state)
    scrimp.trace(Loss(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[3].weight.grad is None


def test_what_is_no_loss_is_refused() -> None:
    """There is nothing to go backward from."""
    with pytest.raises(TraceError, match="need a loss"):
        scrimp.trace(lambda: torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(TraceError, match="need a loss"):
        scrimp.trace(lambda: torch.ones(()))


def test_nodes_are_named() -> None:
    """Backward's own work is in the trace, node by node."""
    trace, _ = traced(Case("transformer"))
    names = {event.name for event in trace.events if isinstance(event, Run)}
    assert {"AddmmBackward0", "NativeLayerNormBackward0", "GeluBackward0"} <= names
