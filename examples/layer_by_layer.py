"""Step the optimizer for each layer as soon as its gradient is final, and see what that saves.

python examples/layer_by_layer.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import scrimp
from scrimp.testing import live_bytes


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)])


def train_plainly(model: nn.Module, data: Tensor, steps: int) -> int:
    """The usual loop; returns the peak of its last step, in bytes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for _ in range(steps):
        with live_bytes() as memory:
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


def train_layer_by_layer(model: nn.Module, data: Tensor, steps: int) -> int:
    """One optimizer for each parameter, stepped during backward."""
    optimizers = {leaf: torch.optim.SGD([leaf], lr=0.01, foreach=False) for leaf in model.parameters()}

    def step_and_free(leaf: Tensor, gradient: Tensor) -> None:
        optimizers[leaf].step()
        leaf.grad = None

    for _ in range(steps):
        with live_bytes() as memory:
            scrimp.backward(model(data).square().mean(), on_leaf_grad_ready=step_and_free)
    return memory.peak


def main() -> None:
    data = torch.randn(32, 512)
    plain, stepped = make_model(), make_model()
    before, after = train_plainly(plain, data, 3), train_layer_by_layer(stepped, data, 3)
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), stepped.parameters(), strict=True))
    parameters = sum(parameter.nbytes for parameter in plain.parameters())
    print(f"parameters, not counted below:              {parameters / 1e6:6.2f} MB")
    print(f"peak of activations and gradients, plainly: {before / 1e6:6.2f} MB")
    print(f"... stepping layer by layer:                {after / 1e6:6.2f} MB ({after / before:.0%})")
    print(f"the same weights, bit by bit:               {same}")


if __name__ == "__main__":
    main()
