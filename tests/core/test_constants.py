"""What nobody can bring back, and replays start from, is held from birth under a plan."""

import torch
from torch import Tensor

import scrimp
from scrimp._plan import Drop, Keep, Plan
from scrimp._simulate import simulate
from scrimp.policy import Planned
from scrimp.testing import Step, assert_same_step, live_bytes


def masked(x: Tensor) -> Tensor:
    """A softmax under a mask that is written in place; the mask is gone when autograd saves the softmax."""
    mask = torch.zeros(64, 64)
    mask.masked_fill_(torch.ones(64, 64, dtype=torch.bool).triu(1), float("-inf"))
    return ((x @ x) + mask).softmax(-1).sum()


def all_dropped(x: Tensor) -> Planned:
    """A plan that drops whatever can be dropped."""
    seen = scrimp.trace(masked, x)
    saved = {value for op in seen.ops for value in op.saves}
    decisions = {
        value: Drop() if seen.ops[seen.values[value].op or 0].replayable else Keep() for value in sorted(saved)
    }
    timeline = simulate(seen, decisions)
    return Planned(seen, Plan(seen.fingerprint(), timeline.peak, decisions, timeline.peak, 1.0, 1.0, 1.0))


def test_a_mask_is_held_for_the_replay_and_counted() -> None:
    """Its bytes stay instead of those of the softmax, as predicted."""
    x = torch.randn(64, 64, requires_grad=True)
    policy = all_dropped(x)
    with live_bytes() as count:
        with scrimp.session(policy=policy) as session:
            loss = masked(x)
        held = count.now
        loss.backward()
    assert session.statistics.replayed_operators > 0
    assert 64 * 64 * 4 <= held < 2 * 64 * 64 * 4
    assert not policy.departed


def test_gradients_through_a_held_mask_are_exact() -> None:
    """The held mask is the one that forward used."""

    def make() -> Step:
        x = torch.randn(64, 64, requires_grad=True)
        return Step(lambda: masked(x), state=x)

    x = torch.randn(64, 64, requires_grad=True)
    assert_same_step(make, lambda: scrimp.session(policy=all_dropped(x)))


def test_held_values_go_when_nobody_needs_them() -> None:
    """After backward, nothing of the step is left."""
    x = torch.randn(64, 64, requires_grad=True)
    policy = all_dropped(x)
    x.grad = None
    with live_bytes() as count:
        with scrimp.session(policy=policy):
            loss = masked(x)
        loss.backward()
        del loss
        x.grad = None
    assert count.now == 0
