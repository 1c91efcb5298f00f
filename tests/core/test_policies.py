"""What the policies keep, and what an online budget evicts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp.errors import PolicyError, SessionError
from scrimp.policy import (
    DROP,
    KEEP,
    Candidate,
    Decision,
    EveryN,
    KeepAll,
    KeepNone,
    KeepOps,
    Online,
    Policy,
    Selective,
)

KIB = 1024
aten = torch.ops.aten


def tower(x: Tensor, height: int = 8) -> Tensor:
    """As many values as it is high, each saved once."""
    for _ in range(height):
        x = x.exp() * 0.5
    return x


@pytest.fixture
def x() -> Tensor:
    """A tensor of one KiB."""
    return torch.linspace(0, 1, 256, requires_grad=True)


@contextmanager
def finished(policy: Policy, x: Tensor) -> Iterator[scrimp.Session]:
    """Run the tower under a policy; afterwards, run backward and compare with plain autograd."""
    with scrimp.session(policy) as session:
        y = tower(x)
    yield session
    (ours,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(tower(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepAll(), 8),
        (KeepNone(), 0),
        (EveryN(1), 8),
        (EveryN(3), 3),
        (KeepOps({aten.exp}), 8),
        (KeepOps({aten.exp.default}), 8),
        (KeepOps({aten.mul}), 0),
        (Selective(0.0), 8),
        (Selective(1.0), 0),
        (Online(5 * KIB), 5),
        (Online(5 * KIB - 1), 4),
        (Online(0), 0),
        (Online(1 << 40), 8),
    ],
    ids=repr,
)
def test_how_many_values_a_policy_keeps(policy: Policy, kept: int, x: Tensor) -> None:
    """Of eight values of one KiB each."""
    with finished(policy, x) as session:
        assert session.statistics.kept.count == kept
        assert session.statistics.kept.bytes == kept * KIB
        assert session.statistics.dropped.count == 8 - kept


def test_a_callable_is_a_policy(x: Tensor) -> None:
    """It is told of each value in turn."""
    seen: list[tuple[int, str, tuple[int, ...], int]] = []

    def policy(value: Candidate) -> Decision:
        seen.append((value.index, value.name, tuple(value.size), value.nbytes))
        assert value.dtype is torch.float32
        assert value.device.type == "cpu"
        assert value.cost > 0
        return KEEP if value.index == 2 else DROP

    with scrimp.session(policy) as session:
        y = tower(x)
    assert seen == [(i, "aten.exp.default", (256,), KIB) for i in range(8)]
    assert session.statistics.kept.count == 1
    y.sum().backward()


def test_cost_counts_what_has_to_be_replayed_first(x: Tensor) -> None:
    """Dropping more makes the values that follow dearer."""
    costs: list[float] = []

    def policy(value: Candidate) -> Decision:
        costs.append(value.cost)
        return DROP

    with scrimp.session(policy):
        tower(x)
    assert costs == sorted(costs)
    assert costs[-1] > 6 * costs[0]


def test_a_matrix_product_costs_more_than_a_pointwise_operator() -> None:
    """Arithmetic counts, by the formulas that PyTorch keeps for it."""
    costs: dict[str, float] = {}

    def policy(value: Candidate) -> Decision:
        costs[value.name] = value.cost
        return KEEP

    a = torch.randn(512, 512, requires_grad=True)
    with scrimp.session(policy):
        a.exp()
        (a @ a) @ a
    assert costs["aten.mm.default"] > 5 * costs["aten.exp.default"]


def test_over_budget_evicts_as_many_as_it_takes() -> None:
    """One large value that arrives needs three small ones to go."""
    small = torch.randn(256, requires_grad=True)
    large = torch.randn(3 * 256, requires_grad=True)
    with scrimp.session(Online(4 * KIB, evict="oldest")) as session:
        values = [small.exp() for _ in range(4)]
        before = session.statistics
        big = large.exp()
        after = session.statistics
    assert (before.kept.count, before.evicted.count) == (4, 0)
    assert (after.kept.bytes, after.kept.count, after.evicted.count) == (4 * KIB, 2, 3)
    (sum(v.sum() for v in values) + big.sum()).backward()
    assert torch.equal(small.grad, 4 * small.exp())
    assert torch.equal(large.grad, large.exp())


def test_over_budget_evicts_no_more_than_needed() -> None:
    """A small value that was picked first is spared when a large one has to go anyhow."""
    cheap = torch.randn(256, requires_grad=True)
    dear = torch.randn(8 * 256, requires_grad=True)
    with scrimp.session(Online(10 * KIB, evict="oldest")) as session:
        small = cheap.exp()
        large = dear.exp()
        other = dear.sin().exp()
        assert session.statistics.evicted.count == 1
        assert session.statistics.kept.bytes == 9 * KIB
    (small.sum() + large.sum() + other.sum()).backward()


@pytest.mark.parametrize("evict", ["cheapest", "oldest"])
def test_eviction_order(evict: str) -> None:
    """By default the value that costs least per byte to have back goes first; else the one made first."""
    a = torch.randn(256, 256, requires_grad=True)
    with scrimp.session(Online(256 * KIB, evict=evict)) as session:
        product = (a @ a).relu_()
        plain = a.exp()
        assert session.statistics.kept.bytes == 256 * KIB
        assert session.statistics.dropped.count == 1
    before = session.statistics.replayed_operators
    torch.autograd.grad(plain.sum(), a)
    replayed_the_cheap_one = session.statistics.replayed_operators > before
    assert replayed_the_cheap_one is (evict == "cheapest")
    torch.autograd.grad(product.sum(), a)


def test_budget_holds_in_backward_too() -> None:
    """What replays bring back stays within the budget."""
    x = torch.linspace(0, 1, 256, requires_grad=True)
    with scrimp.session(Online(3 * KIB)) as session:
        y = tower(x, 30)
    y.sum().backward()
    assert session.statistics.kept.peak_bytes <= 3 * KIB
    assert session.statistics.kept.bytes == 0


def test_policies_can_be_switched_at_run_time(x: Tensor) -> None:
    """Off, everything is kept; on again, the policy is asked; and another policy can be put in."""
    with scrimp.session(KeepNone()) as session:
        session.enabled = False
        y = tower(x, 2)
        assert session.statistics.kept.count == 2
        session.enabled = True
        y = tower(y, 3)
        assert session.statistics.kept.count == 2
        session.policy = EveryN(1)
        y = tower(y, 1)
        assert session.statistics.kept.count == 3
    (ours,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(tower(x, 6).sum(), x)
    assert torch.equal(ours, plain)


def test_a_session_that_keeps_all_cannot_start_to_drop(x: Tensor) -> None:
    """It recorded nothing; the error says what to do instead."""
    with scrimp.session(KeepAll()) as session, pytest.raises(SessionError, match=r"session\.enabled = False"):
        session.policy = KeepNone()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EveryN(0), "n of 1 or more"),
        (lambda: Online(-1), "0 or more"),
        (lambda: Online("8GiB"), "budget in bytes"),
        (lambda: Online(1, evict="youngest"), "'cheapest' or 'oldest'"),
        (lambda: KeepOps({"mm"}), r"torch\.ops\.aten\.mm"),
        (lambda: scrimp.session(KeepNone), "need a Policy"),
        (lambda: scrimp.session(object()), "need a Policy"),
    ],
)
def test_malformed_policies_are_refused(make: object, message: str) -> None:
    """With an error that says what is needed."""
    assert callable(make)
    with pytest.raises(PolicyError, match=message):
        make()


def test_a_policy_that_does_not_decide_is_refused(x: Tensor) -> None:
    """Anything but a Decision is an error, not a guess."""
    with (
        pytest.raises(PolicyError, match=r"policy\.KEEP or policy\.DROP"),
        scrimp.session(lambda value: True),  # type: ignore[arg-type,return-value]
    ):
        tower(x)


def test_a_policy_that_raises_leaves_a_sound_session(x: Tensor) -> None:
    """Its error comes through, and the account is as before."""

    def policy(value: Candidate) -> Decision:
        raise KeyError(value.index)

    session = scrimp.session(policy)
    with pytest.raises(KeyError), session:
        tower(x)
    assert session.statistics.made.count == session.statistics.kept.count == 0
    tower(x).sum().backward()
