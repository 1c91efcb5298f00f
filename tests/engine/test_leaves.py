"""``on_leaf_grad_ready``: once for every leaf, as soon as its gradient is final."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

import scrimp


def blocks(count: int) -> nn.ModuleList:
    """Small layers with known weights."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])


def reports(loss: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Run backward; return what was reported, with copies of the gradients at that moment."""
    seen: list[tuple[Tensor, Tensor]] = []
    scrimp.backward(loss, on_leaf_grad_ready=lambda leaf, gradient: seen.append((leaf, gradient.clone())))
    return seen


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_leaf_once_with_its_final_gradient(reentrant: bool | None) -> None:
    """Through checkpoints of both kinds each leaf is reported once, and its gradient is final."""
    layers = blocks(3)
    layers[2].weight = layers[0].weight  # shared: final only when both uses are done
    x = torch.ones(2, 4, requires_grad=True)
    y = x * 1
    for layer in layers:
        y = (
            layer(y).tanh()
            if reentrant is None
            else checkpoint(lambda z, of=layer: of(z).tanh(), y, use_reentrant=reentrant)
        )
    seen = reports(y.sum())
    expected = {id(leaf) for leaf in [x, *layers.parameters()]}
    assert len(seen) == len(expected)
    assert {id(leaf) for leaf, _ in seen} == expected
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in seen)


def test_a_leaf_inside_and_outside_of_a_checkpoint() -> None:
    """A weight that a reentrant checkpoint uses as well is reported when both of its uses are done."""
    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    y = checkpoint(lambda z: torch.tanh(z @ w), x * 1, use_reentrant=True)
    seen = reports((y @ w).sum())
    assert [leaf is w for leaf, _ in seen].count(True) == 1
    assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in seen)


def test_leaves_of_a_checkpoint_in_a_checkpoint() -> None:
    """Reentrant checkpoints may nest."""
    inner, outer = blocks(2)
    x = torch.ones(2, 4, requires_grad=True)

    def nested(y: Tensor) -> Tensor:
        return outer(checkpoint(inner, y, use_reentrant=True))

    seen = reports(checkpoint(nested, x * 1, use_reentrant=True).sum())
    expected = {id(leaf) for leaf in [x, *inner.parameters(), *outer.parameters()]}
    assert {id(leaf) for leaf, _ in seen} == expected
    assert len(seen) == len(expected)


def test_late_layers_come_first() -> None:
    """A layer is reported before the pass reaches the one below it."""
    layers = blocks(3)
    order: list[str] = []
    y = torch.ones(2, 4)
    for index, layer in enumerate(layers):
        y = layer(y).tanh()
        y.register_hook(lambda _, index=index: order.append(f"into {index}"))
    names = {id(layer.weight): f"weight {index}" for index, layer in enumerate(layers)}
    scrimp.backward(y.sum(), on_leaf_grad_ready=lambda leaf, _: order.append(names.get(id(leaf), "bias")))
    weights = [event for event in order if event != "bias"]
    assert weights == ["into 2", "weight 2", "into 1", "weight 1", "into 0", "weight 0"]


def test_the_callback_may_step_and_free() -> None:
    """Stepping and freeing layer by layer gives the weights of a step after backward."""
    ours, theirs = blocks(3), blocks(3)
    x = torch.ones(2, 4)
    steps = {parameter: torch.optim.AdamW([parameter]) for parameter in ours.parameters()}
    whole = torch.optim.AdamW(theirs.parameters(), foreach=False)

    def step(leaf: Tensor, _: Tensor) -> None:
        steps[leaf].step()
        leaf.grad = None

    for _ in range(3):
        scrimp.backward(nn.Sequential(*ours)(x).square().sum(), on_leaf_grad_ready=step)
        nn.Sequential(*theirs)(x).square().sum().backward()
        whole.step()
        whole.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in ours.parameters())


def add_one(leaf: Tensor) -> None:
    """A hook that changes a gradient."""
    leaf.grad.add_(1)


def test_hooks_of_the_user_come_first() -> None:
    """Tensor hooks and post-accumulate hooks have run when a leaf is reported."""
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    x.register_post_accumulate_grad_hook(add_one)
    ((_, gradient),) = reports((x * 3).sum())
    assert torch.equal(gradient, torch.full((2,), 7.0))


def test_only_the_inputs_that_were_asked_for() -> None:
    """With ``inputs=`` other leaves get no gradient and no report."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    scrimp.backward((x * y).sum(), inputs=[x], on_leaf_grad_ready=lambda leaf, _: seen.append(leaf))
    assert [leaf is x for leaf in seen] == [True]


def test_an_error_in_the_callback_stops_the_pass() -> None:
    """It surfaces as it is, and later passes do not call the callback."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (x.sin() * y).sum()

    def fail(leaf: Tensor, _: Tensor) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        scrimp.backward(loss, retain_graph=True, on_leaf_grad_ready=fail)
    assert x.grad is None
    loss.backward()


def test_an_error_inside_a_checkpoint_leaves_no_mode_behind() -> None:
    """What looks for hidden leaves is gone when the recomputation raises."""
    calls = iter([False, True])

    def fragile(y: Tensor) -> Tensor:
        if next(calls):
            raise OSError("while recomputing")
        return y * 2

    loss = checkpoint(fragile, torch.ones(2, requires_grad=True) * 1, use_reentrant=True).sum()
    with pytest.raises(OSError, match="recomputing"):
        reports(loss)
    assert _len_torch_function_stack() == 0


class LateUse(torch.autograd.Function):
    """Adds to a leaf in a backward of its own, unseen by the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: list[Tensor]) -> Tensor:
        """Keep the leaf, out of sight."""
        ctx.hidden = hidden
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Run a nested pass."""
        with torch.enable_grad():
            ctx.hidden[0].sum().backward()
        return gradient, None


def test_a_gradient_after_the_report_is_an_error() -> None:
    """A nested pass that adds to a reported leaf raises, rather than adding to a gradient that was used."""
    x, leaf = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (LateUse.apply(x, [leaf]) * leaf).sum()
    with pytest.raises(scrimp.errors.LateGradientError, match="use_reentrant=False"):
        scrimp.backward(loss, on_leaf_grad_ready=lambda leaf, gradient: None)


def dropout_net() -> nn.Sequential:
    """Four layers with dropout and known weights."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])


def in_regions(model: nn.Sequential, x: Tensor) -> Tensor:
    """Each layer a region of its own."""
    for layer in model:
        x = scrimp.checkpoint(layer, x)
    return x


def in_a_region_of_regions(model: nn.Sequential, x: Tensor) -> Tensor:
    """Regions in a region."""
    return scrimp.checkpoint(in_regions, model, x)


def in_a_session(model: nn.Sequential, x: Tensor) -> Tensor:
    """Nothing is kept."""
    with scrimp.session(policy=scrimp.policy.KeepNone()):
        return model(x)


def in_a_budget(model: nn.Sequential, x: Tensor) -> Tensor:
    """A budget that a step meets."""
    with scrimp.session("1MB"):
        return model(x)


@pytest.mark.parametrize("forward", [in_regions, in_a_region_of_regions, in_a_session, in_a_budget])
def test_leaves_are_reported_through_scrimps_own_regions(forward: Any) -> None:
    """Once each, layer by layer from the last to the first, with the gradients of the plain step."""
    ours, theirs = dropout_net(), dropout_net()
    x = torch.ones(2, 8)
    torch.manual_seed(1)
    theirs(x).square().sum().backward()
    torch.manual_seed(1)
    seen = reports(forward(ours, x).square().sum())
    layer_of = {id(leaf): index for index, layer in enumerate(ours) for leaf in layer.parameters()}
    assert [layer_of[id(leaf)] for leaf, _ in seen] == [3, 3, 2, 2, 1, 1, 0, 0]
    expected = {id(mine): other.grad for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)}
    assert all(torch.equal(gradient, expected[id(leaf)]) for leaf, gradient in seen)


@pytest.mark.parametrize(
    "way", [in_regions, in_a_session, in_a_budget, "limit"], ids=lambda way: getattr(way, "__name__", way)
)
def test_layers_are_stepped_in_what_replays_from_their_weights(way: Any) -> None:
    """A weight that is stepped as soon as it is ready is not needed by what is replayed later: the same weights."""
    ours, theirs = dropout_net(), dropout_net()
    steps = {leaf: torch.optim.AdamW([leaf]) for leaf in ours.parameters()}
    whole = torch.optim.AdamW(theirs.parameters(), foreach=False)
    limit = scrimp.limit(ours, "1MB") if way == "limit" else None

    def step(leaf: Tensor, _: Tensor) -> None:
        steps[leaf].step()
        leaf.grad = None

    for number in range(3):
        x = torch.full((2, 8), number + 1.0)
        torch.manual_seed(number)
        loss = (ours(x) if limit is not None else way(ours, x)).square().sum()
        scrimp.backward(loss, on_leaf_grad_ready=step)
        torch.manual_seed(number)
        theirs(x).square().sum().backward()
        whole.step()
        whole.zero_grad()
    if limit is not None:
        limit.detach()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_pass_that_a_hook_runs_first_is_not_the_reported_one() -> None:
    """It adds to the leaf before any node of the pass has run; the leaf is reported when the pass itself did."""
    w = torch.ones(3, requires_grad=True)
    other, loss = (w * 3).sum(), (w * 2).sum()
    loss.register_hook(lambda _: other.backward())
    reported: list[Tensor] = []
    scrimp.backward(loss, on_leaf_grad_ready=lambda leaf, gradient: reported.append(gradient.clone()))
    assert len(reported) == 1
    assert torch.equal(reported[0], torch.full((3,), 5.0))
