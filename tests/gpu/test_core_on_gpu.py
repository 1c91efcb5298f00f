"""Exactness on a GPU: generators, streams, autocast, attention kernels, and peaks of the allocator."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scrimp
from scrimp.policy import DROP, Decision, EveryN, KeepNone, Online, Policy
from scrimp.testing import Step, assert_same_step

POLICIES = [KeepNone(), EveryN(2), EveryN(3), Online(1 << 20)]

# Leaves that two streams read get their gradients from both; autograd waits for them, and says that this costs time.
leaves_of_two_streams = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bits can only be compared where the step repeats; where attention was only to warn, it would not."""
    torch.use_deterministic_algorithms(True)
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


@leaves_of_two_streams
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


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions(policy: Policy, memory_format: torch.memory_format) -> None:
    """A residual network under autocast keeps layouts, in-place activations and buffers as they are."""

    def make_step() -> Step:
        net = nn.Sequential(
            nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, stride=2),
            nn.BatchNorm2d(32, momentum=None), nn.SiLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.3),
            nn.ConvTranspose2d(32, 8, 2, stride=2),
        ).cuda().to(memory_format=memory_format)  # fmt: skip
        x = torch.randn(4, 8, 32, 32, device="cuda").to(memory_format=memory_format).requires_grad_()

        def forward() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return net(x).float().square().mean()

        return Step(forward, state=(net, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(policy: Policy, kind: type[nn.RNNBase]) -> None:
    """CuDNN's recurrent kernels keep a reserve of their own for backward."""

    def make_step() -> Step:
        net = kind(32, 64, num_layers=2, bidirectional=True).cuda()
        x = torch.randn(7, 3, 32, device="cuda", requires_grad=True)
        return Step(lambda: net(x.sin())[0].exp().mean(), state=(net, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("length", [128, 77])
def test_attention(policy: Policy, backend: SDPBackend, dropout: float, length: int) -> None:
    """The kernels alone, in bfloat16, also of a length that they pad, amid other operators."""

    def make_step() -> Step:
        q, k, v = (
            torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q.sin(), k.cos(), v * 2, is_causal=True, dropout_p=dropout)
            return F.dropout(y, 0.1).float().exp().mean()

        return Step(forward, state=(q, k, v))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_draws_of_all_kinds(policy: Policy) -> None:
    """Each way to draw on the device is repeated from the generator's state and offset, whatever comes between."""

    def make_step() -> Step:
        x = torch.rand(4097, device="cuda", requires_grad=True)

        def forward() -> Tensor:
            y = F.dropout(x, 0.3) * torch.rand_like(x) + torch.randn(4097, device="cuda") * x.exp()
            y = F.rrelu(y - 0.5, training=True) + torch.bernoulli(torch.full_like(x, 0.5)) * y.sin()
            y = F.alpha_dropout(y, 0.2) * torch.empty_like(x).uniform_(0.5, 1.5)
            order = torch.randperm(4097, device="cuda")
            return (F.gumbel_softmax(y[order].view(17, 241)) * y.view(17, 241).exp()).sum()

        return Step(forward, state=x)

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_backward_on_another_stream_and_in_another_thread(policy: Policy) -> None:
    """Replays run where backward runs, and wait for what they read."""

    def run(under: AbstractContextManager[object], elsewhere: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        with under:
            loss = F.dropout((x @ x.sin()).tanh().exp(), 0.1).sigmoid().mean()
        if not elsewhere:
            loss.backward()
            return x.grad
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def backward() -> None:
            with torch.cuda.stream(side):
                loss.backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        torch.cuda.current_stream().wait_stream(side)
        return x.grad

    plain = run(nullcontext(), elsewhere=False)
    for _ in range(3):
        assert torch.equal(run(scrimp.session(policy), elsewhere=True), plain)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_parameters_on_the_host(policy: Policy) -> None:
    """Copies between devices, also asynchronous ones, are repeated like other operators."""

    def make_step() -> Step:
        weight = torch.randn(512, 512, requires_grad=True)
        pinned = torch.randn(512, 512).pin_memory()
        x = torch.randn(64, 512, device="cuda", requires_grad=True)

        def forward() -> Tensor:
            y = (x @ weight.cuda().tanh()).sin() @ pinned.to("cuda", non_blocking=True).exp()
            return y.cpu().sigmoid().mean() + y.half().float().cos().mean().cpu()

        return Step(forward, state=(weight, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


@pytest.mark.parametrize("deterministic", [True, False])
def test_atomics(deterministic: bool) -> None:
    """Operators that add by atomics are replayed only where they repeat."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    index = torch.randint(64, (1 << 18,), device="cuda")

    def values(_candidate: object) -> Decision:
        return DROP

    x = torch.randn(1 << 18, device="cuda", requires_grad=True)
    with scrimp.session(values, verify=True) as session:
        y = x.new_zeros(64).index_add(0, index, x).tanh().exp()
        z = torch.zeros(64, device="cuda").scatter_add_(0, index, x.sin()).cos()
        loss = (y * z).sum()
    loss.backward()
    assert session.statistics.replayed_operators


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler itself
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_compiled_part(policy: Policy) -> None:
    """A compiled module in a session is a custom function with kernels of its own: what it makes is kept."""

    def make_step() -> Step:
        torch._dynamo.reset()
        inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
        compiled = torch.compile(inner)
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        return Step(lambda: compiled(x.sin()).exp().mean(), state=(inner, x))

    assert_same_step(make_step, lambda: scrimp.session(policy))


def test_recurrent_dropout_is_not_replayed() -> None:
    """The state of cuDNN's own dropout is hidden, so its results are kept."""

    def make_step() -> Step:
        net = nn.LSTM(32, 64, num_layers=2, dropout=0.5).cuda()
        x = torch.randn(7, 3, 32, device="cuda", requires_grad=True)
        return Step(lambda: net(x.sin())[0].exp().mean(), state=(net, x))

    assert_same_step(make_step, lambda: scrimp.session(KeepNone()))


def test_peak_of_a_region_is_about_torch_s() -> None:
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
    assert ours <= torchs * 1.03  # one tensor of a block more was seen
