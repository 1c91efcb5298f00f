"""A small equilibrium network beside its unrolled twin: the same accuracy, and memory that does not grow with depth.

python examples/deq.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp.jacobian import jacobian_penalty

WIDTH, DEPTH, EPOCHS = 32, 30, 40


class Cell(nn.Module):
    """One layer, whose state is fed back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        """The next state."""
        return torch.tanh(u + self.narrow(F.gelu(self.wide(x))))


class Network(nn.Module):
    """Two inputs, an equilibrium or its unrolled approximation, two classes."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = nn.Linear(2, WIDTH), Cell(), nn.Linear(WIDTH, 2)
        self.unrolled = unrolled

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the penalty that keeps the equilibrium easy to find."""
        u = self.encode(points)
        x = torch.zeros_like(u)
        if self.unrolled:
            for _ in range(DEPTH):
                x = self.cell(x, u)
        else:
            x, _ = scrimp.fixed_point(self.cell, x, u, batch_dims=1, rtol=1e-4)
        return self.decode(x), jacobian_penalty(self.cell, x, u, batch_dims=1).mean()


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on two spirals, and which."""
    radius = torch.rand(count, generator=generator) * 0.9 + 0.1
    label = torch.randint(2, (count,), generator=generator)
    angle = 7 * radius + torch.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return 2 * points + 0.03 * torch.randn(count, 2, generator=generator), label


def saved_bytes(network: Network, points: Tensor) -> int:
    """Bytes of the tensors that autograd holds between forward and backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    held = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = torch.zeros(len(points), WIDTH)
        u = network.encode(points)
        if network.unrolled:
            for _ in range(DEPTH):
                x = network.cell(x, u)
                held.append(x)
        else:
            x, _ = scrimp.fixed_point(network.cell, x, u, batch_dims=1, rtol=1e-4)
    return sum(seen.values())


def train(unrolled: bool) -> tuple[float, int]:
    """Accuracy on new points, and bytes held for backward."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    network = Network(unrolled)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    points, labels = spirals(512, generator)
    for _ in range(EPOCHS):
        for batch in torch.randperm(512, generator=generator).split(128):
            scores, penalty = network(points[batch])
            loss = F.cross_entropy(scores, labels[batch]) + 2 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    new_points, new_labels = spirals(1000, generator)
    with torch.no_grad():
        accuracy = (network(new_points)[0].argmax(1) == new_labels).float().mean()
    return float(accuracy), saved_bytes(network, points)


def main() -> None:
    for unrolled in (False, True):
        accuracy, held = train(unrolled)
        name = f"unrolled, {DEPTH} steps" if unrolled else "equilibrium"
        print(f"{name:20} accuracy {accuracy:.3f}, {held / 1024:7.0f} KiB held for backward")


if __name__ == "__main__":
    main()
