"""The budgets that errors name: for optimizers without state yet, models that ask their data, checkpoints inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp._optimizers import Coming, state_of, state_to_come
from scrimp.errors import BudgetError
from scrimp.testing import live_bytes

from .steps import held
from .test_promises import blocks

CPU = torch.device("cpu")


class Lasting(torch.optim.Optimizer):
    """One of the user's own: counts on its own, and holds as much as the rows of a parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.steps = 0
        self.shared = torch.zeros(16)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Add up what the gradients are."""
        self.steps += 1
        self.shared.add_(1)
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    rows = self.state[one].setdefault("rows", torch.zeros(one.shape[0], device=one.device))
                    rows.add_(one.grad.flatten(1).sum(1) if one.ndim > 1 else one.grad)


class Closed(torch.optim.Optimizer):
    """Cannot step on its own."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        """Call what computes the loss."""
        return closure()


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(1e-3), momentum=0.9),
    "one's own": Lasting,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_is_going_to_hold_is_foreseen(name: str) -> None:
    """To the byte, before its first step, which does not happen and shows in no hook; after it nothing is to come."""
    model = blocks(2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    stepped = []
    optimizer.register_step_pre_hook(lambda *_: stepped.append(1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    coming = state_to_come(list(model.parameters()), CPU)
    assert not stepped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(optimizer.state.values())
    assert getattr(optimizer, "steps", 0) == 0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert coming == Coming(sum(one.nbytes for one in state_of({id(one) for one in model.parameters()})))
    assert state_to_come(list(model.parameters()), CPU) == Coming()


def test_an_optimizer_in_the_middle_of_its_work_keeps_its_state() -> None:
    """What one of its parameters is going to have is found out without touching what the others have."""
    model = blocks(2)
    optimizer = torch.optim.AdamW(model.parameters())
    *stepped, late = list(model.parameters())
    for parameter in stepped:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counts = [optimizer.state[parameter]["step"].item() for parameter in stepped]
    assert state_to_come(list(model.parameters()), CPU) == Coming(2 * late.nbytes + 4)
    assert [optimizer.state[parameter]["step"].item() for parameter in stepped] == counts


def run(model: nn.Module, batch: Tensor, budget: int, make: Make | None = None, steps: int = 3) -> list[int]:
    """Train under a budget; return the peaks of the steps."""
    optimizer = (make or OPTIMIZERS["SGD"])(list(model.parameters()))
    session = scrimp.limit(model, budget)
    peaks = []
    try:
        for _ in range(steps):
            there = held(model, optimizer) + batch.nbytes
            with live_bytes() as count:
                model(batch).backward()
            peaks.append(there + count.peak)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        session.detach()
        model.zero_grad()
    return peaks


def refused(model: nn.Module, batch: Tensor, budget: int, make: Make | None = None) -> tuple[int, str]:
    """Return what the error names, and all that it says."""
    with pytest.raises(BudgetError) as caught:
        run(model, batch, budget, make)
    assert caught.value.smallest is not None
    return caught.value.smallest, str(caught.value)


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the squares."""
        loss: Tensor = self.body(x).square().mean()
        return loss


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "one's own"])
def test_the_named_budget_is_enough_for_the_steps_after_the_first_as_well(name: str) -> None:
    """Those in which the optimizer has its state."""
    model, batch = WithLoss(blocks(6)), torch.randn(96, 48)
    smallest, said = refused(model, batch, 120_000, OPTIMIZERS[name])
    assert "for optimizer state to come" in said
    peaks = run(model, batch, smallest, OPTIMIZERS[name])
    assert max(peaks) <= smallest
    assert max(peaks) > smallest * 0.85


def test_an_optimizer_whose_step_cannot_be_tried_is_named() -> None:
    """Nothing is guessed about what it is going to hold."""
    model, batch = WithLoss(blocks(6)), torch.randn(96, 48)
    optimizer = Closed(list(model.parameters()))
    _, said = refused(model, batch, 120_000)
    assert "What Closed is going to hold cannot be foreseen" in said
    assert not optimizer.state


def test_the_named_budget_knows_the_gradients_that_are_there() -> None:
    """They are there from the beginning of a step that adds to them."""
    model, batch = WithLoss(blocks(6, width=96)), torch.randn(48, 96)
    model(batch).backward()
    there = sum(2 * parameter.nbytes for parameter in model.parameters()) + batch.nbytes
    session = scrimp.limit(model, there + 1000)
    with pytest.raises(BudgetError) as caught:
        model(batch).backward()
    session.detach()
    assert caught.value.smallest is not None
    session = scrimp.limit(model, caught.value.smallest)
    for _ in range(2):
        with live_bytes() as count:
            model(batch).backward()
        assert there + count.peak <= caught.value.smallest
    session.detach()


class Routed(nn.Module):
    """Sends each row to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for _ in range(2):
            weights, choice = self.gate(x).softmax(-1).max(-1)
            routed = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (choice == number).nonzero().flatten()
                if rows.numel():
                    routed = routed.index_add(0, rows, expert(x[rows]) * weights[rows, None])
            x = x + routed
        return x.square().mean()


class Waiting(nn.Module):
    """Goes on until a number that it computes is small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks(2, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        state = torch.zeros_like(x)
        far = torch.ones(())
        while bool(far > 0.2):
            after = 0.5 * state + 0.1 * self.body(state + x)
            far = (after - state).abs().max().detach()
            state = after
        return state.square().mean()


class Checkpointed(nn.Module):
    """Has regions that PyTorch computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks(6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for part in self.body:
            x = checkpoint(part, x, use_reentrant=False)
        return x.square().mean()


ASKING: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "routed": (Routed, 32), "waiting": (Waiting, 32), "checkpointed": (Checkpointed, 48),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_a_budget_that_works_is_named_within_three_errors(name: str) -> None:
    """From one that nothing can meet, where routing, the number of rounds or PyTorch's own checkpoints have a say."""
    make, width = ASKING[name]
    model, batch = make(), torch.randn(128, width)
    with live_bytes() as count:
        model(batch).backward()
    plain = count.peak + batch.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    model.zero_grad()
    budget = batch.nbytes + sum(parameter.nbytes for parameter in model.parameters()) + 1
    for _ in range(3):
        budget, _ = refused(model, batch, budget)
        try:
            peaks = run(model, batch, budget)
        except BudgetError:
            continue
        break
    else:
        pytest.fail(f"{budget} bytes, named by the third error, do not work either")
    assert max(peaks) <= budget < plain


class Squared(torch.autograd.Function):
    """The square; what a Function saves cannot be dropped."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Square it."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        """Multiply by the slope."""
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        slope: Tensor = 2 * x * gradients[0]
        return slope


class Choosing(nn.Module):
    """Looks at its data to choose what to do next, and keeps much for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for _ in range(8):
            wide = Squared.apply(x * self.weight)
            x = wide if bool(wide.mean() > 1e6) else wide[:-4]
        return x.mean()


def test_a_step_that_does_not_fit_goes_on_to_see_what_it_asks_its_data() -> None:
    """Within the budget, with nothing kept for backward; the error at the end of the forward pass names what works."""
    model, batch = Choosing(), torch.randn(256, 64)
    there = batch.nbytes + model.weight.nbytes
    budget = there + 4 * batch.nbytes
    session = scrimp.limit(model, budget)
    sees_all = "Rehearsed without data, forward and backward fit into"
    with live_bytes() as count, pytest.raises(BudgetError, match=sees_all) as caught:
        model(batch)
    session.detach()
    assert there + count.peak <= budget
    assert caught.value.smallest is not None
    assert max(run(model, batch, caught.value.smallest)) <= caught.value.smallest


def test_kernels_of_the_host_are_rehearsed_as_such() -> None:
    """Sums along a dimension repeat on the CPU, though not on every GPU: the named budget knows that they can go."""

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8):
                x = torch.tanh(x.cumsum(1) * self.weight)
            return x.square().mean()

    model, batch = Summing(), torch.randn(256, 64)
    smallest, _ = refused(model, batch, batch.nbytes + 100_000)
    assert smallest < 8 * batch.nbytes
    assert max(run(model, batch, smallest)) <= smallest
