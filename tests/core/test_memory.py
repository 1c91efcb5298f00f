"""Live bytes of a region that keeps nothing: never more than torch's own checkpoint, less where that one leaks."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp.policy import KeepNone
from scrimp.testing import LiveBytes, live_bytes

torch_checkpoint = partial(checkpoint, use_reentrant=False)

Checkpoint = Callable[..., Tensor]


class GPTBlock(nn.Module):
    """Attention and a perceptron, with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, width // 4).transpose(1, 2)
            for part in self.attention(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.project(attended), 0.1)
        return x + F.dropout(self.perceptron(self.norms[1](x)), 0.1)


class ResNetBlock(nn.Module):
    """Convolutions, batch norms, and in-place ReLUs."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Residual, out of place at the end."""
        return F.relu(self.body(x) + x)


class UNetBlock(nn.Module):
    """Two levels with a skip connection; as many channels out as in."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.bottom = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, channels, 2, stride=2)
        self.merge = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Down and up."""
        skip = self.down(x)
        return self.merge(torch.cat([skip, self.up(self.bottom(F.max_pool2d(skip, 2)))], dim=1))


@dataclass(frozen=True, slots=True)
class Net:
    """A stack of equal blocks and its input."""

    block: type[nn.Module]
    shape: tuple[int, ...]

    def build(self) -> tuple[nn.ModuleList, Tensor]:
        """Four blocks."""
        return nn.ModuleList(self.block() for _ in range(4)), torch.randn(self.shape)


NETS = {
    "GPT": Net(GPTBlock, (4, 24, 32)),
    "ResNet": Net(ResNetBlock, (4, 8, 12, 12)),
    "U-Net": Net(UNetBlock, (4, 8, 12, 12)),
}
every_net = pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the cycle collector, only reference counting gives memory back."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_step(net: Net, region: Callable[[nn.Module, Tensor], Tensor]) -> LiveBytes:
    """Forward and backward of a stack; gradients exist before, so that they count nothing."""
    torch.default_generator.manual_seed(0)
    blocks, x = net.build()
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x.requires_grad_()
    x.grad = torch.zeros_like(x)
    with no_collector(), live_bytes() as count:
        y = x
        for block in blocks:
            y = region(block, y)
        y.square().mean().backward()
        del y
    return count


@every_net
def test_peak_with_a_region_a_block(net: Net) -> None:
    """A region around each block: forward and backward peak no higher than with torch's checkpoint."""
    ours = count_step(net, scrimp.checkpoint)
    theirs = count_step(net, torch_checkpoint)
    plain = count_step(net, lambda block, x: block(x))
    assert ours.peak <= theirs.peak < plain.peak


@every_net
def test_peak_with_one_region(net: Net) -> None:
    """One region around the whole stack peaks no higher than with torch's checkpoint."""

    def whole(region: Checkpoint) -> LiveBytes:
        return count_step(Net(lambda: nn.Sequential(*net.build()[0]), net.shape), region)

    assert whole(scrimp.checkpoint).peak <= whole(torch_checkpoint).peak


@every_net
def test_nothing_is_alive_after_backward(net: Net) -> None:
    """Reference counting alone gives everything back, and the session's account says so."""
    assert count_step(net, scrimp.checkpoint).now == 0
    session = scrimp.session(policy=KeepNone())

    def under_session(block: nn.Module, x: Tensor) -> Tensor:
        with session:
            return block(x)

    assert count_step(net, under_session).now == 0
    assert (session.statistics.kept.bytes, session.statistics.dropped.bytes) == (0, 0)


@every_net
def test_nothing_is_alive_without_backward(net: Net) -> None:
    """A graph that is thrown away takes everything along."""
    blocks, x = net.build()
    with no_collector(), live_bytes() as count:
        y = x.requires_grad_()
        for block in blocks:
            y = scrimp.checkpoint(block, y)
        del y
        assert count.now == 0


def held_between_regions(region: Checkpoint, call: Callable[[Checkpoint, Tensor], Tensor]) -> int:
    """Bytes alive after the forward of a region that is the only user of its large input."""
    x = torch.randn(64, 64, requires_grad=True)
    with no_collector(), live_bytes() as count:
        y = call(region, x)
        held = count.now
        y.sum().backward()
    return held


def inner(a: Tensor) -> Tensor:
    """Needs only the sine of its input for backward; saves much."""
    return a.sin().cos().tanh().exp()


def close_over(region: Checkpoint, a: Tensor) -> Tensor:
    """Give the region its input by closure."""
    return region(lambda: inner(a))


CALLS: dict[str, Callable[[Checkpoint, Tensor], Tensor]] = {
    "positional": lambda region, x: region(inner, x * 2),
    "keyword": lambda region, x: region(lambda *, a: inner(a), a=x * 2),
    "container": lambda region, x: region(lambda tree: inner(tree["a"][0]), {"a": [x * 2]}),
    "closure": lambda region, x: close_over(region, x * 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_input_is_held_once(call: Callable[[Checkpoint, Tensor], Tensor]) -> None:
    """Whatever way a region gets its input, it holds no more than input and output, and no more than torch's."""
    ours, theirs = held_between_regions(scrimp.checkpoint, call), held_between_regions(torch_checkpoint, call)
    assert ours <= theirs
    assert ours <= 2 * 64 * 64 * 4


@pytest.mark.parametrize("name", ["keyword", "container", "closure"])
def test_less_than_torch_where_it_keeps_arguments(name: str) -> None:
    """An inner region's input belongs to the outer region, which drops it; torch's keeps it unless it is positional."""

    def nested(region: Checkpoint, x: Tensor) -> Tensor:
        return region(lambda x: CALLS[name](region, x.exp()), x)

    assert held_between_regions(scrimp.checkpoint, nested) < held_between_regions(torch_checkpoint, nested)


def test_repeated_partial_gradients_do_not_grow() -> None:
    """Twenty times `autograd.grad(retain_graph=True)` hold as much as once."""
    x = torch.randn(64, 64, requires_grad=True)
    with no_collector(), live_bytes() as count:
        y = scrimp.checkpoint(inner, x * 2).sum()
        held = []
        for _ in range(20):
            torch.autograd.grad(y, x, retain_graph=True)
            held.append(count.now)
    assert len(set(held)) == 1


def test_the_comparison_can_fail() -> None:
    """A region that keeps everything peaks higher than torch's checkpoint."""
    keeping = partial(scrimp.checkpoint, policy=scrimp.policy.KeepAll())
    assert count_step(NETS["GPT"], keeping).peak > count_step(NETS["GPT"], torch_checkpoint).peak
