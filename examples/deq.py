"""A small equilibrium network beside its unrolled twin: the same accuracy, and flat memory.

python examples/deq.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp

WIDTH, DEPTH, EPOCHS = 32, 30, 40


def step(x: Tensor, u: Tensor, weight: Tensor) -> Tensor:
    """The layer whose state is fed back to it."""
    return torch.tanh(u + x @ weight)


class Network(nn.Module):
    """Two inputs, an equilibrium or its unrolled approximation, two classes."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.unrolled = unrolled

    def forward(self, points: Tensor) -> Tensor:
        """Scores."""
        return self.decode(self.equilibrium(points))

    def equilibrium(self, points: Tensor) -> Tensor:
        """The state that the layer maps to itself."""
        u = self.encode(points)
        # A matrix of norm below one is a contraction, so the equilibrium exists and is the only one.
        weight = self.weight * (0.9 / torch.linalg.matrix_norm(self.weight, 2).clamp_min(0.9))
        x = torch.zeros_like(u)
        if self.unrolled:
            for _ in range(DEPTH):
                x = step(x, u, weight)
            return x
        return scrimp.fixed_point(step, x, u, weight, batch_dims=1, rtol=1e-4)[0]


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points on two spirals, and which."""
    radius = torch.rand(count, generator=generator) * 0.9 + 0.1
    label = torch.randint(2, (count,), generator=generator)
    angle = 7 * radius + torch.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return 2 * points + 0.03 * torch.randn(count, 2, generator=generator), label


def saved_bytes(network: Network, points: Tensor) -> int:
    """Bytes that autograd holds between forward and backward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            kept[pointer] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network.equilibrium(points)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def train(unrolled: bool) -> tuple[float, int]:
    """Accuracy on new points, and bytes held for backward."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    network = Network(unrolled)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    points, labels = spirals(512, generator)
    for _ in range(EPOCHS):
        for batch in torch.randperm(512, generator=generator).split(128):
            loss = F.cross_entropy(network(points[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    new_points, new_labels = spirals(1000, generator)
    with torch.no_grad():
        accuracy = (network(new_points).argmax(1) == new_labels).float().mean()
    return float(accuracy), saved_bytes(network, points)


def main() -> None:
    print(f"Two spirals, a layer of width {WIDTH} fed back to itself, {EPOCHS} epochs:")
    print(f"{'':26} accuracy on new points   held for backward (512 points)", flush=True)
    for unrolled in (False, True):
        accuracy, held = train(unrolled)
        name = f"unrolled, {DEPTH} steps" if unrolled else "equilibrium, by scrimp"
        print(f"{name:26} {accuracy:22.1%}   {held / 1024:12.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
