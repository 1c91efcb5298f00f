"""Randomness, hidden state, and settings that change between forward and backward."""

import contextvars
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Policy

POLICIES = [KeepAll(), KeepNone(), EveryN(2), EveryN(3)]


def assert_same_run(run: Callable[[Policy | None], list[Tensor]], policy: Policy) -> None:
    """Fail unless ``run(policy)`` gives the bits of ``run(None)``."""
    for index, (plain, ours) in enumerate(zip(run(None), run(policy), strict=True)):
        assert torch.equal(plain, ours), f"result {index} differs"


def test_the_comparison_can_fail() -> None:
    """A run that depends on the policy is caught."""
    with pytest.raises(AssertionError, match="result 0"):
        assert_same_run(lambda policy: [torch.tensor(0 if policy is None else 1)], KeepNone())


@contextmanager
def under(policy: Policy | None) -> Iterator[None]:
    """Enter a session, or nothing for None."""
    if policy is None:
        yield
    else:
        with scrimp.session(policy):
            yield


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_and_later_draws(policy: Policy) -> None:
    """Masks are replayed from the generator's state, which goes on afterwards as if nothing had happened."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.randn(8, 8, requires_grad=True)
        with under(policy):
            y = F.dropout(F.dropout(x, 0.3).sin(), 0.5).exp()
        between = torch.rand(2)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, between, torch.rand(2)]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_own_generators(policy: Policy) -> None:
    """A user's generator is set back for the replay and left where it was."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(5)
        x = torch.ones(8, requires_grad=True)
        with under(policy):
            noise = torch.empty(8).normal_(generator=own)
            mask = torch.bernoulli(torch.full((8,), 0.5), generator=own)
            y = (x * noise).sin() * mask + (x * torch.rand(8)).exp() * torch.rand(8, generator=own)
        own.manual_seed(17)
        y.square().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, torch.rand(2, generator=own), torch.rand(2)]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_python_and_numpy_random(policy: Policy) -> None:
    """The forward code never runs twice, so what it draws in Python cannot skew."""

    def run(policy: Policy | None) -> list[Tensor]:
        random.seed(1)
        np.random.seed(1)
        x = torch.ones(4, requires_grad=True)
        with under(policy):
            y = x * random.random()
            y = y.exp() * float(np.random.rand()) if random.random() < 0.5 else y.sin()
            y = y.tanh()
        y.sum().backward()
        assert x.grad is not None
        return [x.grad, torch.tensor([random.random(), float(np.random.rand())])]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", [EveryN(2), EveryN(3), KeepNone()])
def test_one_random_operator_kept_and_a_later_one_dropped(policy: Policy) -> None:
    """Each replayed operator draws from its own state, whatever was replayed before it."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(16, requires_grad=True)
        with under(policy):
            y = x
            for _ in range(6):
                y = y * torch.rand_like(y) + F.rrelu(y, training=True)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, torch.rand(1)]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_norm_statistics_update_once(policy: Policy) -> None:
    """Running statistics are written by the forward pass alone."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        )
        x = torch.randn(3, 2, 6, 6, requires_grad=True)
        with under(policy):
            y = net(x).sigmoid()
        y.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_read_in_evaluation_and_written_by_training_later(policy: Policy) -> None:
    """A replay in evaluation mode uses the running statistics as they were, though nothing says they changed."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, affine=False)
        x = torch.randn(5, 4, requires_grad=True)
        norm(torch.randn(5, 4))
        with under(policy):
            norm.eval()
            frozen = norm(x * 2).exp()
            norm.train()
            norm(torch.randn(5, 4) + 3)
        # Autograd itself reads the statistics at backward; only what does not depend on that is compared.
        (mean,) = torch.autograd.grad(frozen.sum(), frozen, retain_graph=True)
        return [frozen.detach(), mean]

    assert_same_run(run, policy)


def test_default_dtype_changed_before_backward() -> None:
    """Operators are replayed under the default dtype of their forward pass."""

    def run(policy: Policy | None) -> list[Tensor]:
        x = torch.arange(1, 5, requires_grad=False)
        w = torch.ones(4, requires_grad=True)
        with under(policy):
            y = (w * torch.sqrt(x)).exp()
        if policy is not None:
            torch.set_default_dtype(torch.float64)
        try:
            y.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        assert w.grad is not None
        return [w.grad]

    assert_same_run(run, KeepNone())


def test_settings_changed_in_the_middle_of_forward() -> None:
    """Each operator is replayed under the settings it ran under, not those at the session's start."""
    x = torch.arange(1, 5)
    w = torch.ones(4, requires_grad=True)
    with scrimp.session(KeepNone(), verify=True):
        torch.set_default_dtype(torch.float64)
        try:
            y = (w * torch.sqrt(x)).exp()
        finally:
            torch.set_default_dtype(torch.float32)
    assert y.dtype is torch.float64
    y.sum().backward()
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(w.grad.double(), (torch.sqrt(x.double()).exp() * torch.sqrt(x.double())).float().double())


def test_context_variables_and_thread_locals() -> None:
    """What Python code reads from its surroundings is read once, in forward."""
    scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)
    local = threading.local()
    local.power = 3.0
    x = torch.ones(3, requires_grad=True)
    y = scrimp.checkpoint(lambda x: ((x * scale.get()) ** local.power).sin(), x)
    scale.set(100.0)
    local.power = -1.0
    y.sum().backward()
    assert x.grad is not None
    plain = torch.ones(3, requires_grad=True)
    ((plain * 2.0) ** 3.0).sin().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_backward_in_another_thread() -> None:
    """A replay runs in whichever thread asks for the value."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        with under(policy):
            y = F.dropout(x @ x, 0.5).exp().tanh() @ x
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        assert x.grad is not None
        return [x.grad, torch.rand(1)]

    assert_same_run(run, KeepNone())


def test_sessions_in_several_threads_do_not_meet() -> None:
    """Each thread has its own recorder; operators of others are none of its business."""
    failures: list[BaseException] = []
    plain = torch.linspace(0, 1, 100, requires_grad=True)
    plain.exp().sin().tanh().sum().backward()

    def work() -> None:
        try:
            for _ in range(20):
                x = torch.linspace(0, 1, 100, requires_grad=True)
                with scrimp.session(KeepNone()) as session:
                    y = x.exp().sin().tanh()
                y.sum().backward()
                assert torch.equal(x.grad, plain.grad)
                assert session.statistics.made.total == 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_session_whose_values_two_threads_ask_for() -> None:
    """Two backward passes over two branches of one session run at the same time."""

    def gradients_of_branches() -> list[Tensor]:
        x = torch.linspace(0, 1, 1000, requires_grad=True)
        with scrimp.session(KeepNone()) as session:
            shared = x.exp()
            branches = [(shared * k).sin().tanh().sum() for k in (1.0, 2.0)]
        results: dict[int, Tensor] = {}

        def work(index: int) -> None:
            results[index] = torch.autograd.grad(branches[index], x, retain_graph=True)[0]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        branches.clear()
        del shared
        assert session.statistics.kept.bytes == 0
        return [results[0], results[1]]

    plain = torch.linspace(0, 1, 1000, requires_grad=True)
    expected = [torch.autograd.grad((plain.exp() * k).sin().tanh().sum(), plain)[0] for k in (1.0, 2.0)]
    for _ in range(20):
        for ours, one in zip(gradients_of_branches(), expected, strict=True):
            assert torch.equal(ours, one)


def test_grad_mode_is_that_of_the_forward_pass() -> None:
    """Backward inside ``no_grad`` replays just the same."""
    x = torch.ones(3, requires_grad=True)
    y = scrimp.checkpoint(lambda x: x.exp().sin(), x).sum()
    with torch.no_grad():
        y.backward()
    assert torch.equal(x.grad, torch.cos(torch.ones(3).exp()) * torch.ones(3).exp())


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast(policy: Policy) -> None:
    """Casts are replayed as they were made, whether or not autocast is on in backward."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
        with under(policy), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(4, 8)).float().square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]

    assert_same_run(run, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_statistics_that_are_intermediate_values(policy: Policy) -> None:
    """Instance norm repeats its statistics and has the kernel write to the copy, which autograd saved before."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        mean, var = torch.zeros(5), torch.ones(5)
        x = torch.randn(5, 5, 5, requires_grad=True)
        with under(policy):
            y = F.instance_norm(x, mean, var, use_input_stats=True).exp()
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, mean, var]

    assert_same_run(run, policy)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_randomized_leaky_relu(training: bool, inplace: bool) -> None:
    """Its noise is written by the operator that reads it, and only in training."""

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(20, requires_grad=True)
        with under(policy):
            y = F.rrelu(x * 2, training=training, inplace=inplace).exp()
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, torch.rand(1)]

    assert_same_run(run, KeepNone())


def test_backend_settings_changed_in_the_middle_of_forward() -> None:
    """A convolution is replayed with the libraries that it was allowed to use."""
    allowed: list[bool] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                allowed.append(torch._C._get_mkldnn_enabled())
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3, requires_grad=True)
    with Look():
        with scrimp.session(KeepNone()):
            y = F.conv2d(x, weight)
            torch._C._set_mkldnn_enabled(False)
            y = F.conv2d(y.exp(), weight)
            torch._C._set_mkldnn_enabled(True)
            y = F.conv2d(y.exp(), weight).exp()
        y.sum().backward()
    assert allowed[:3] == [True, False, True]
    assert allowed[3:] == [True, False, True]


def test_operators_that_do_not_repeat_are_kept() -> None:
    """Writes by index are made in parallel, in any order, unless deterministic algorithms are asked for."""
    index = torch.randint(64, (1 << 16,))
    x, total = torch.randn(1 << 16, requires_grad=True), torch.zeros(64)

    def replayed() -> int:
        with scrimp.session(KeepNone()) as session:
            y = total.index_put((index,), x, accumulate=True).exp()
        (y * y).sum().backward()
        return session.statistics.replayed_operators

    assert replayed() == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert replayed() > 1
    finally:
        torch.use_deterministic_algorithms(False)
