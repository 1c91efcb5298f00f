"""A budget on a GPU: held by the allocator's own count, from the first step on, with the bits of the plain step."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp import BudgetError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def a_device_of_our_own() -> Iterator[None]:
    """Begin without what other tests left, repeat bits, and take the process's limit away again."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        q, k, v = (part.view(*x.shape[:2], 8, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


def network(width: int = 512, depth: int = 6) -> nn.Module:
    """The same one each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to("cuda", torch.bfloat16)


def train(model: nn.Module, steps: int = 5) -> tuple[list[int], list[Tensor]]:
    """The peaks of some steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    peaks = []
    for _ in range(steps):
        batch = torch.randn(32, 512, 512, device="cuda", dtype=torch.bfloat16)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        model(batch).float().square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        optimizer.step()
        optimizer.zero_grad()
    return peaks, [parameter.detach().cpu() for parameter in model.parameters()]


def allow(nbytes: int) -> None:
    """Have the allocator refuse more."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)


@pytest.mark.parametrize("part", [1.0, 0.8, 0.6, 0.4])
def test_every_step_is_within_the_budget(part: float) -> None:
    """The process is not given more than the budget, and the parameters are those of plain training."""
    peaks, plain = train(network())
    budget = int(max(peaks) * part)
    del peaks
    model = network()
    session = scrimp.limit(model, budget)
    allow(budget)
    peaks, ours = train(model)
    session.detach()
    assert max(peaks) <= budget
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_the_predicted_peak_is_the_measured_one() -> None:
    """What a plan promises differs by less than 2% from what the allocator counts."""
    peaks, _ = train(network())
    model = network()
    session = scrimp.limit(model, int(max(peaks) * 0.7))
    peaks, _ = train(model, steps=6)
    assert session.plan is not None
    predicted = session.plan.peak
    session.detach()
    assert abs(peaks[-1] - predicted) < 0.02 * predicted


def test_an_operator_that_runs_out_of_memory_runs_again() -> None:
    """Where less is to be had than the budget says, values are dropped when the allocator fails."""
    peaks, plain = train(network(), steps=2)
    model = network()
    session = scrimp.limit(model, max(peaks) * 2)
    allow(int(max(peaks) * 0.7))
    _, ours = train(model, steps=2)
    evicted = session.statistics.evicted.total
    session.detach()
    assert evicted
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_running_out_of_memory_for_good_is_an_error_that_names_a_budget() -> None:
    """When nothing is left that could go, the allocator's failure is told as what a larger budget would need."""
    peaks, _ = train(network(), steps=1)
    model = network()
    session = scrimp.limit(model, max(peaks) * 2)
    allow(torch.cuda.memory_allocated() + 64 * MIB)
    with pytest.raises(BudgetError) as caught:
        train(model, steps=1)
    session.detach()
    assert caught.value.smallest is not None
    assert caught.value.smallest > torch.cuda.memory_allocated()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def named_after(budget: int) -> int | None:
    """The budget that an error names; None where four steps are held within this one."""
    gc.collect()
    gc.collect()
    model = network()
    session = scrimp.limit(model, budget)
    peaks, named = [], None
    try:
        peaks, _ = train(model, steps=4)
    except BudgetError as error:
        named = error.smallest
    session.detach()
    assert max(peaks, default=0) <= budget
    assert named is None or named > budget
    return named


def test_errors_lead_to_a_budget_that_works() -> None:
    """From one that nothing can meet; what operators take within themselves only a first step can tell."""
    budget: int | None = torch.cuda.memory_allocated() + MIB
    for _ in range(4):
        assert budget is not None
        budget = named_after(budget)
        if budget is None:
            return
    pytest.fail("four errors, one after the other")


def test_a_limited_model_follows_to_the_gpu() -> None:
    """A model that is moved after it was limited is limited where it is then."""
    peaks, plain = train(network())
    model = network().cpu()
    session = scrimp.limit(model, int(max(peaks) * 0.7))
    model.cuda()
    ours_peaks, ours = train(model)
    session.detach()
    assert max(ours_peaks) <= max(peaks) * 0.7
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_a_function_that_closes_over_all_it_needs_is_traced_on_the_gpu() -> None:
    """Without an argument that says where a step runs, it is the current GPU."""
    model = network(depth=1)
    batch = torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16)
    seen = scrimp.trace(lambda: model(batch).float().square().mean())
    assert scrimp.planning.simulate(seen).peak > batch.nbytes
