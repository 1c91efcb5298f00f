"""Stores on a GPU: exact while copies run beside the step, memory given back in stream order, no races."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp.policy import DROP, KEEP, Planned, Policy, StoreAll, StoreInputs, StoreLargerThan, StoreOps
from scrimp.store import Disk, Host, Store
from scrimp.store._measure import measured
from scrimp.testing import Step, assert_same_step

aten = torch.ops.aten
MB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bits can only be compared where the step repeats."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["host", "host, one at a time", "host, little room", "pageable", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each way to store."""
    match request.param:
        case "host":
            return Host()
        case "host, one at a time":
            return Host(window=1)
        case "host, little room":
            return Host("8MiB")
        case "pageable":
            host = Host()
            monkeypatch.setattr(host._pool, "_allocate", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
            return host
    return Disk(tmp_path)


class Block(nn.Module):
    """A gated perceptron with dropout: views, masks, in-place operators."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(a).mul_(b)), 0.1)


def make_step() -> Step:
    """Six blocks, of which each saves several megabytes."""
    model = nn.Sequential(*(Block() for _ in range(6))).cuda()
    x = torch.randn(2048, 256, device="cuda", requires_grad=True)
    return Step(lambda: model(x).square().mean(), state=(model, x))


POLICIES: dict[str, Callable[[Store], Any]] = {
    "all": StoreAll,
    "operators": lambda store: StoreOps({aten.addmm, aten.native_dropout}, store),
    "large": lambda store: StoreLargerThan(3 * MB, store),
    "in turn": lambda store: lambda value: (KEEP, DROP, store)[value.index % 3],
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_step_is_exact(policy: Callable[[Store], Any], store: Store) -> None:
    """Bits are those of the plain step, again and again with memory and pinned pieces used over."""
    for inside in (False, True, False):
        assert_same_step(make_step, lambda: scrimp.session(policy(store)), backward_inside=inside)
    assert store.statistics.held.total > 0
    assert store.statistics.held.bytes == 0


def test_under_pressure(store: Store) -> None:
    """While other work takes and overwrites every byte that is given back, nothing is given back too early."""

    def noisy_step() -> Step:
        step = make_step()

        def forward() -> object:
            loss = step.forward()
            for _ in range(20):
                torch.full((4 * MB,), float("nan"), device="cuda")
            return loss

        return Step(forward, state=step.state)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            torch.full((4 * MB,), float("nan"), device="cuda")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            torch.full((4 * MB,), float("nan"), device="cuda")
            return grads[0]

    def poisoned_step() -> Step:
        blocks = nn.ModuleList(Block() for _ in range(4)).cuda()
        x = torch.randn(2048, 256, device="cuda", requires_grad=True)

        def forward() -> Tensor:
            y = x
            for block in blocks:
                y = Poison.apply(block(y))
            return y.square().mean()

        return Step(forward, state=(blocks, x))

    for make in (noisy_step, poisoned_step):
        for _ in range(3):
            assert_same_step(make, lambda: scrimp.session(StoreAll(store)))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # it waits, and says what that costs
def test_side_streams(store: Store) -> None:
    """Values made on another stream leave from there and come back where they are needed."""

    def make() -> Step:
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        side = torch.cuda.Stream()

        def forward() -> Tensor:
            main = torch.cuda.current_stream()
            total = x.new_zeros(())
            for _ in range(4):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    branch = (x @ x.sin()).tanh().exp().sigmoid()
                trunk = (x * 0.5).exp().tanh()
                main.wait_stream(side)
                branch.record_stream(main)
                total = total + (branch * trunk).mean()
            return total

        return Step(forward, state=x)

    for _ in range(3):
        assert_same_step(make, lambda: scrimp.session(StoreAll(store)))


def test_in_place_writes_wait_for_the_copy() -> None:
    """A value that is overwritten while it is on its way out arrives as it was."""
    host = Host()
    x = torch.randn(64 * MB // 4, device="cuda", requires_grad=True)
    for _ in range(3):
        with scrimp.session(StoreAll(host)):
            y = x.exp()
            z = y.sum()
            y.detach().mul_(0)
        (gradient,) = torch.autograd.grad(z, x)
        assert torch.equal(gradient, x.detach().exp())


def test_writes_after_the_session() -> None:
    """When a session is left, what left it is whole, whatever happens to the storage next."""
    host = Host()
    x = torch.randn(64 * MB // 4, device="cuda", requires_grad=True)
    with scrimp.session(StoreAll(host)):
        y = x.exp()
        z = y.sum()
    y.data.zero_()
    (gradient,) = torch.autograd.grad(z, x)
    assert torch.equal(gradient, x.detach().exp())


def test_backward_again_and_never() -> None:
    """``retain_graph`` brings values back each time and holds nothing in between; a dropped graph frees the host."""
    host = Host()
    x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    with scrimp.session(StoreAll(host)) as session:
        loss = x.exp().tanh().sigmoid().sum()
    held = set()
    first = None
    for _ in range(4):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        first = gradient if first is None else first
        assert torch.equal(gradient, first)
        torch.cuda.synchronize()
        held.add((session.statistics.kept.bytes, torch.cuda.memory_allocated()))
    assert len(held) <= 2  # the first gradient is not there yet in the first pass
    del loss
    assert host.statistics.held.bytes == 0


def test_an_exception_in_backward() -> None:
    """What was on its way when a pass fails lands safely, and is not used."""
    host = Host()
    model = nn.Sequential(*(Block() for _ in range(4))).cuda()
    x = torch.randn(2048, 256, device="cuda", requires_grad=True)
    for _ in range(3):
        with scrimp.session(StoreAll(host)):
            y = model[:2](x)
            y.register_hook(lambda grad: 1 / 0)
            loss = model[2:](y).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del y, loss
        assert host.statistics.held.bytes == 0
    assert_same_step(make_step, lambda: scrimp.session(StoreAll(host)))


def peak(policy: Policy | None) -> int:
    """The most bytes of a step of twelve blocks, above what stands before it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(512) for _ in range(12))).cuda()
    x = torch.randn(16384, 512, device="cuda")
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if policy is None:
            loss = model(x).square().mean()
        else:
            with scrimp.session(policy):
                loss = model(x).square().mean()
        loss.backward()
        del loss
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_given_back() -> None:
    """Storing everything peaks at a fraction of plain, although the host runs ahead of the device."""
    assert peak(StoreAll(Host(window="64MiB"))) < 0.4 * peak(None)


def test_inputs_of_regions() -> None:
    """Regions whose inputs are stored need no more memory for more of them."""

    def region_peak(count: int) -> int:
        host = Host(window="64MiB")
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(512) for _ in range(count)).cuda()
        for parameter in blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(16384, 512, device="cuda", requires_grad=True)
        x.grad = torch.zeros_like(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = x
        for block in blocks:
            y = scrimp.checkpoint(block, y, policy=StoreInputs(host))
        y.square().mean().backward()
        return torch.cuda.max_memory_allocated() - before

    assert region_peak(16) <= region_peak(8) + 16 * MB


def test_pinned_memory_is_used_again() -> None:
    """The second step needs no more pinned memory than the first."""
    host = Host()
    taken = []
    for _ in range(4):
        assert_same_step(make_step, lambda: scrimp.session(StoreAll(host)))
        taken.append(host._pool.allocated)
    assert len(set(taken)) == 1


def test_statistics() -> None:
    """Bandwidths of the copy engines, and how long the step stood still."""
    host = Host()
    x = torch.randn(64 * MB, device="cuda", requires_grad=True)
    with scrimp.session(StoreAll(host)):
        loss = x.exp().tanh().sum()
    loss.backward()
    after = host.statistics
    assert after.bytes_out == after.bytes_in == 2 * x.nbytes
    assert after.out_bandwidth > 1e9
    assert after.in_bandwidth > 1e9
    assert after.waited_seconds > 0


def deep(width: int = 512, depth: int = 12) -> nn.Module:
    """A network whose activations are most of what a step takes."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth))).cuda()


def trained(net: nn.Module, steps: int) -> tuple[int, list[Tensor]]:
    """The highest peak of a few steps, and the gradients of the last."""
    torch.manual_seed(1)
    batches = torch.randn(steps, 2048, 512).cuda()
    torch.cuda.synchronize()
    highest = 0
    for batch in batches:
        net.zero_grad()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        net(batch).square().mean().backward()
        torch.cuda.synchronize()
        highest = max(highest, torch.cuda.max_memory_allocated())
    return highest, [parameter.grad.cpu() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_a_budget_with_stores(kind: str, tmp_path: Path) -> None:
    """From the first step on within the budget of the device, with the plain gradients; stores are empty in the end."""
    plain_peak, plain = trained(deep(), 1)
    budget = int(plain_peak * 0.7)
    net = deep()
    disk = Disk(tmp_path, "4GiB")
    stores: dict[str, Any] = {"host": {"host": "4GiB"}, "disk": {"disk": disk}, "both": {"host": "64MiB", "disk": disk}}
    session = scrimp.limit(net, budget, **stores[kind])
    try:
        first, gradients = trained(net, 1)
        assert first <= budget
        for one, other in zip(gradients, plain, strict=True):
            assert torch.equal(one, other)
        highest, _ = trained(net, 4)
        assert highest <= budget
        assert session.stored is not None
        assert session.stored.held.count == 0
        assert session.trace is not None
        assert session.trace.out_bandwidth > 0
    finally:
        session.detach()


def test_a_joint_plan_is_carried_out() -> None:
    """A plan with stores, for the measured link: its peak is met, and its gradients are the plain ones."""
    net = deep()
    torch.manual_seed(1)
    batch = torch.randn(2048, 512).cuda()
    seen = scrimp.trace(lambda: net(batch).square().mean())
    speed = measured(Host(), torch.device("cuda"))
    linked = dataclasses.replace(seen, out_bandwidth=speed.out, in_bandwidth=speed.back)
    plan = scrimp.plan(linked, int(scrimp.planning.simulate(linked).peak * 0.8), host="8GiB")
    gradients = []
    for policy in (None, Planned(linked, plan, Host())):
        net.zero_grad()
        torch.manual_seed(2)
        torch.cuda.reset_peak_memory_stats()
        with nullcontext() if policy is None else scrimp.session(policy):
            loss = net(batch).square().mean()
        loss.backward()
        torch.cuda.synchronize()
        gradients.append([one.grad.cpu() for one in net.parameters() if one.grad is not None])
        if policy is not None:
            assert torch.cuda.max_memory_allocated() <= plan.peak * 1.01
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
