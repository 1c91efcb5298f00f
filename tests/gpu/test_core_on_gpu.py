"""Exactness on a GPU: generators, streams, autocast, attention kernels, and peaks of the allocator."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scrimp
from scrimp.policy import EveryN, KeepNone, Online, Policy
from scrimp.testing import Step, assert_same_step

POLICIES = [KeepNone(), EveryN(2), EveryN(3), Online(1 << 20)]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bits can only be compared where the step repeats."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int = 256, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        q, k, v = (
            part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_attention_with_dropout_under_autocast(policy: Policy, backend: SDPBackend) -> None:
    """Each attention kernel draws again what it drew, and the device's generator goes on undisturbed."""

    def make_step() -> Step:
        model = nn.Sequential(Block(), Block()).cuda()
        x = torch.randn(2, 128, 256, device="cuda", requires_grad=True)

        def forward() -> Tensor:
            with sdpa_kernel(backend), torch.autocast("cuda", dtype=torch.bfloat16):
                return model(x).float().square().mean()

        return Step(forward, state=(model, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_own_and_default_generators(policy: Policy) -> None:
    """A CUDA generator of the user's is set back for a replay and left where it was."""

    def make_step() -> Step:
        own = torch.Generator("cuda").manual_seed(3)
        x = torch.ones(1000, device="cuda", requires_grad=True)

        def forward() -> Tensor:
            noise = torch.empty(1000, device="cuda").normal_(generator=own)
            return ((x * noise).sin() * torch.rand(1000, device="cuda")).exp().sum() + F.dropout(x.exp(), 0.5).sum()

        return Step(forward, state=x, generators=(own,))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_side_streams(policy: Policy) -> None:
    """Values made on another stream are replayed on the stream that needs them, while memory is reused all the time."""

    def make_step() -> Step:
        x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
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

    for _ in range(5):
        assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_batch_norm(policy: Policy) -> None:
    """The running statistics that cuDNN's batch norm writes are updated once."""

    def make_step() -> Step:
        net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3)).cuda()
        x = torch.randn(4, 8, 32, 32, device="cuda", requires_grad=True)
        return Step(lambda: net(x).square().mean(), state=(net, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


def test_recurrent_dropout_is_not_replayed() -> None:
    """The state of cuDNN's own dropout is hidden, so its results are kept."""

    def make_step() -> Step:
        net = nn.LSTM(32, 64, num_layers=2, dropout=0.5).cuda()
        x = torch.randn(7, 3, 32, device="cuda", requires_grad=True)
        return Step(lambda: net(x.sin())[0].exp().mean(), state=(net, x))

    assert_same_step(make_step, lambda: scrimp.session(KeepNone()))


def test_peak_of_a_region_is_no_higher_than_torch_s() -> None:
    """Measured by the allocator, forward and backward."""

    def peak(call: Callable[..., Tensor]) -> int:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(512) for _ in range(6)).cuda()
        x = torch.randn(8, 512, 512, device="cuda", requires_grad=True)
        for _ in range(2):
            blocks.zero_grad()
            x.grad = None
            torch.cuda.reset_peak_memory_stats()
            y = x
            for block in blocks:
                y = call(block, y)
            y.square().mean().backward()
        return torch.cuda.max_memory_allocated()

    ours = peak(scrimp.checkpoint)
    torchs = peak(lambda block, y: torch_checkpoint(block, y, use_reentrant=False))
    assert ours <= torchs * 1.005
