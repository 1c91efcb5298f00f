"""The architectures of the model set that transformers does not have, or not as people write them by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class LlamaBlock(nn.Module):
    """Rotary attention and SwiGLU, each after an RMS norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Transform a batch of sequences."""
        h = self.norm1(x)
        q, k, v = (
            project(h).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """A decoder of Llama's kind with an fp32 loss."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets``."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return token_loss(self.head(self.norm(x)), targets)


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch of pictures."""
        y = self.body(x)
        y += self.shortcut(x)
        result: Tensor = self.relu(y)
        return result


class ResNet(nn.Module):
    """A residual network with bottlenecks."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        blocks, into = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(into, width << stage, 2 if stage and not number else 1))
                into = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(into, classes)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of classifying the pictures."""
        x = self.blocks(self.stem(pictures)).mean((2, 3))
        return token_loss(self.head(x), targets)


def convolved(into: int, out: int) -> nn.Module:
    """Two convolutions with norms, at one resolution."""
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(min(8, out), out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(min(8, out), out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.first = convolved(3, width)
        self.down = nn.ModuleList(convolved(into, 2 * into) for into in widths[:-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * out, out, 2, 2) for out in reversed(widths[:-1]))
        self.merge = nn.ModuleList(convolved(2 * out, out) for out in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of predicting ``targets``."""
        x = self.first(pictures)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), skips.pop()), dim=1))
        return F.mse_loss(self.last(x).float(), targets.float())


class StateSpace(nn.Module):
    """A selective state-space layer, scanned in chunks: matrix products within one, a loop over them."""

    def __init__(self, width: int, heads: int, state: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.state, self.chunk, self.inner = heads, state, chunk, 2 * width
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 2 * self.inner + 2 * state + heads, bias=False)
        self.mix = nn.Conv1d(
            self.inner + 2 * state, self.inner + 2 * state, 4, padding=3, groups=self.inner + 2 * state
        )
        self.decay = nn.Parameter(torch.zeros(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.out = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch of sequences, of a length that is a multiple of the chunk."""
        batch, length, _ = x.shape
        gate, mixed, step = self.into(self.norm(x)).split((self.inner, self.inner + 2 * self.state, self.heads), dim=-1)
        mixed = F.silu(self.mix(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        u, b, c = mixed.split((self.inner, self.state, self.state), dim=-1)
        step = F.softplus(step.float())
        u = u.view(batch, length, self.heads, -1)
        y = self._scan(u * step.to(u.dtype)[..., None], -step * self.decay.exp(), b, c)
        y = (y + u * self.skip[:, None]).reshape(batch, length, self.inner)
        result: Tensor = x + self.out(y * F.silu(gate))
        return result

    def _scan(self, u: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        results = []
        carried: Tensor | None = None
        for u_n, log_n, b_n, c_n in zip(*(t.split(self.chunk, dim=1) for t in (u, log_decay, b, c)), strict=True):
            summed = log_n.cumsum(dim=1)
            between = (summed[:, :, None] - summed[:, None]).masked_fill(
                torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=u.device).triu(1)[..., None], -torch.inf
            )
            weights = (c_n @ b_n.transpose(1, 2))[..., None] * between.exp().to(u.dtype)
            y = torch.einsum("btsh,bshp->bthp", weights, u_n)
            if carried is not None:
                y = y + torch.einsum("btn,bhnp->bthp", c_n, carried) * summed.exp().to(u.dtype)[..., None]
            left = (summed[:, -1:] - summed).exp().to(u.dtype)
            fresh = torch.einsum("bsn,bsh,bshp->bhnp", b_n, left, u_n)
            total = summed[:, -1].exp().to(u.dtype)[..., None, None]
            carried = fresh if carried is None else fresh + carried * total
            results.append(y)
        return torch.cat(results, dim=1)


class Mamba(nn.Module):
    """A language model of state-space layers."""

    def __init__(self, layers: int, width: int, heads: int, state: int, chunk: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(StateSpace(width, heads, state, chunk) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets``."""
        return token_loss(self.head(self.norm(self.blocks(self.tokens(tokens)))), targets)


class Recurrent(nn.Module):
    """A language model of LSTM layers with dropout between them."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting ``targets``."""
        return token_loss(self.head(self.layers(self.tokens(tokens))[0]), targets)


class Equilibrium(nn.Module):
    """A classifier whose features are the fixed point of one layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.into = nn.Linear(3 * 64, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, pictures: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of classifying pictures, cut into patches of 8 by 8."""
        patches = F.pixel_unshuffle(pictures, 8).flatten(2).transpose(1, 2)
        x = self.into(patches)
        state, _ = scrimp.fixed_point(
            lambda z: torch.tanh(x + 0.5 * self.down(F.gelu(self.up(z)))),
            torch.zeros_like(x), rtol=1e-3, max_steps=30, batch_dims=1, on_fail="ignore",
        )  # fmt: skip
        return token_loss(self.head(state.mean(1)), targets)
