"""Models and ways to train them that are hard on recomputation, bit for bit against plain torch."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import scrimp
from scrimp.policy import EveryN, KeepAll, KeepNone, Online, Selective
from scrimp.testing import Step, assert_same_outcome, assert_same_step


class ResidualBlock(nn.Module):
    """Convolutions, batch norm, and ReLUs that write in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input in place too."""
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += x
        return self.relu(y)


class UNet(nn.Module):
    """Long skip connections, pooling, transposed convolutions, group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.convolve(a, b) for a, b in ((3, 8), (8, 16)))
        self.bottom = self.convolve(16, 16)
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ((16, 16), (8, 8)))
        self.merge = nn.ModuleList(self.convolve(a, b) for a, b in ((32, 8), (16, 8)))

    @staticmethod
    def convolve(channels: int, out: int) -> nn.Module:
        """One level."""
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(inplace=True), nn.Dropout2d(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Down, and up again."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return x


class TiedLanguageModel(nn.Module):
    """One matrix embeds the tokens and projects to the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.block(self.embed(tokens)))


def perceptron() -> nn.Module:
    """A few layers with dropout."""
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 4)
    )


def resnet_step() -> Step:
    """Two residual blocks on an image that requires grad."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ResidualBlock(8), ResidualBlock(8))
    image = torch.randn(4, 3, 10, 10, requires_grad=True)
    return Step(lambda: model(image), state=(model, image))


def unet_step() -> Step:
    """A denoiser."""
    model, image = UNet(), torch.randn(2, 3, 16, 16)
    return Step(lambda: model(image).square().mean(), state=model)


def recurrent_step(kind: type[nn.RNNBase]) -> Step:
    """Two layers over a sequence, with dropout between them."""
    model, x = kind(8, 16, num_layers=2, dropout=0.3, bidirectional=True), torch.randn(7, 3, 8, requires_grad=True)
    return Step(lambda: model(x)[0], state=(model, x))


def packed_lstm_step() -> Step:
    """Sequences of different lengths."""
    model, x = nn.LSTM(8, 16, batch_first=True), torch.randn(3, 7, 8, requires_grad=True)

    def forward() -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [7, 4, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)[0]

    return Step(forward, state=(model, x))


def unrolled_cell_step() -> Step:
    """A recurrent cell called in a Python loop, stopping where the data says so."""
    cell, x = nn.GRUCell(8, 8), torch.randn(3, 8, requires_grad=True)

    def forward() -> Tensor:
        state = torch.zeros(3, 8)
        for _ in range(20):
            state = cell(x, state)
            if state.abs().max() > 0.4:
                break
        return state

    return Step(forward, state=(cell, x))


def autocast_step() -> Step:
    """Parameters in float32, matrix products in bfloat16, weights cast once and cached."""
    model, x = nn.Sequential(*(perceptron()[i] for i in (0, 1, 2, 3))), torch.randn(6, 8, requires_grad=True)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x) + model(x.roll(1, 0))

    return Step(forward, state=(model, x))


def functional_step() -> Step:
    """Parameters that are not the module's own, and are swapped in for the call only."""
    model = perceptron()
    parameters = {name: torch.randn_like(value).requires_grad_() for name, value in model.named_parameters()}
    x = torch.randn(6, 8)
    return Step(lambda: functional_call(model, parameters, x), state=(model, parameters))


def frozen_half_step() -> Step:
    """The first layers do not train, in evaluation mode and under no_grad; one later layer is frozen too."""
    body, head, x = ResidualBlock(4).eval(), perceptron(), torch.randn(2, 4, 4, 4)
    body.requires_grad_(False)
    head[3].requires_grad_(False)

    def forward() -> Tensor:
        with torch.no_grad():
            features = body(x)
        return head(features.flatten(2).flatten(0, 1).view(-1, 8))

    return Step(forward, state=(body, head))


def tied_step() -> Step:
    """Tied embedding and head."""
    model, tokens = TiedLanguageModel(), torch.randint(23, (3, 9))
    return Step(lambda: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), state=model)


def shared_activation_step() -> Step:
    """An activation used by many, modified in place after some of them."""
    model, x = perceptron(), torch.randn(6, 8, requires_grad=True)

    def forward() -> Tensor:
        hidden = model[:2](x)
        doubled = hidden + hidden
        hidden.mul_(0.5).add_(doubled)
        return model[2:](hidden) + hidden.sum()

    return Step(forward, state=(model, x))


STEPS: dict[str, Callable[[], Step]] = {
    "resnet": resnet_step,
    "unet": unet_step,
    "lstm": functools.partial(recurrent_step, nn.LSTM),
    "gru": functools.partial(recurrent_step, nn.GRU),
    "packed lstm": packed_lstm_step,
    "unrolled cell": unrolled_cell_step,
    "autocast": autocast_step,
    "functional_call": functional_step,
    "frozen half": frozen_half_step,
    "tied weights": tied_step,
    "shared activation": shared_activation_step,
}
every_step = pytest.mark.parametrize("make_step", STEPS.values(), ids=STEPS.keys())


@every_step
@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
def test_everything_dropped(make_step: Callable[[], Step], backward_inside: bool) -> None:
    """A session that keeps nothing, with backward inside of it and outside; and it does replay."""
    session = scrimp.session(policy=KeepNone())
    assert_same_step(make_step, lambda: session, backward_inside=backward_inside)
    assert session.statistics.replayed_operators > 0
    assert session.statistics.kept.bytes == 0


@every_step
def test_random_parts_dropped(make_step: Callable[[], Step], random_policy: Callable[..., Any]) -> None:
    """Ten mixtures of kept and dropped values."""
    for seed in range(10):
        assert_same_step(make_step, lambda seed=seed: scrimp.session(policy=random_policy(seed)))


@every_step
@pytest.mark.parametrize(
    "policy", [KeepAll(), EveryN(3), Selective(1e-6), Online(4000), Online(4000, evict="oldest")], ids=str
)
def test_every_policy(make_step: Callable[[], Step], policy: object) -> None:
    """The policies that scrimp has."""
    assert_same_step(make_step, lambda: scrimp.session(policy=policy))


@every_step
def test_one_region(make_step: Callable[[], Step]) -> None:
    """The whole forward pass as one checkpointed function that closes over everything."""

    def checkpointed() -> Step:
        step = make_step()
        return Step(functools.partial(scrimp.checkpoint, step.forward), step.state)

    assert_same_outcome(make_step, checkpointed)


@every_step
def test_a_region_in_a_region_in_a_session(make_step: Callable[[], Step]) -> None:
    """Nesting changes nothing."""

    def nested() -> Step:
        step = make_step()

        def forward() -> object:
            with scrimp.session(policy=EveryN(2)):
                return scrimp.checkpoint(lambda: scrimp.checkpoint(step.forward))

        return Step(forward, step.state)

    assert_same_outcome(make_step, nested)


@pytest.mark.parametrize("make_step", [resnet_step, unet_step, tied_step, autocast_step])
def test_gradient_accumulation(make_step: Callable[[], Step]) -> None:
    """Three micro-batches, each with its session and its backward, add up the same gradients and statistics."""

    def accumulate(session: Callable[[], Any]) -> Step:
        step = make_step()

        def forward() -> list[object]:
            outputs = []
            for _ in range(3):
                with session():
                    output = step.forward()
                step.backward(output)
                outputs.append(output.detach())
            return outputs

        return Step(forward, step.state)

    assert_same_outcome(
        lambda: accumulate(nullcontext),
        lambda: accumulate(lambda: scrimp.session(policy=KeepNone())),
    )


@pytest.mark.parametrize("shared", [True, False], ids=["one session", "two sessions"])
def test_two_forwards_before_a_backward(shared: bool, random_policy: Callable[..., Any]) -> None:
    """Draws and running statistics of two passes interleave with their backwards, in the order of torch's graph."""

    def twice(session: Callable[[], Any]) -> Step:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU(inplace=True))
        inputs = torch.randn(2, 6, 8, requires_grad=True)

        def forward() -> list[Tensor]:
            if shared:
                with session():
                    return [model(one) for one in inputs]
            outputs = []
            for one in inputs:
                with session():
                    outputs.append(model(one))
            return outputs

        def backward(outputs: list[Tensor]) -> None:
            for output in outputs:
                output.square().sum().backward()

        return Step(forward, (model, inputs), backward)

    plain = functools.partial(twice, nullcontext)
    assert_same_outcome(plain, lambda: twice(lambda: scrimp.session(policy=KeepNone())))
    assert_same_outcome(plain, lambda: twice(lambda: scrimp.session(policy=random_policy(3))))


def test_whole_training_runs() -> None:
    """Ten steps of Adam end in the same parameters and the same optimizer state."""

    def train(session: Callable[[], Any]) -> Step:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1))
        data = torch.randn(10, 6, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []

        def forward() -> list[Tensor]:
            for batch in data:
                optimizer.zero_grad()
                with session():
                    loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            moments = [value for state in optimizer.state.values() for value in state.values()]
            return losses + moments

        return Step(forward, model)

    assert_same_outcome(
        lambda: train(nullcontext),
        lambda: train(lambda: scrimp.session(policy=KeepNone())),
    )
