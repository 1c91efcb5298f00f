"""Small steps whose values are stored."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import scrimp
from scrimp.policy import StoreAll
from scrimp.store import Disk


def leaf() -> Tensor:
    """A leaf of ``SIZE`` bytes."""
    return torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()


def chain(x: Tensor) -> Tensor:
    """Operators that save their results: four values of the size of ``x``."""
    return x.exp().tanh().sigmoid().sqrt().sum()


def assert_right(x: Tensor, f: Callable[[Tensor], Tensor] = chain) -> None:
    """Fail unless a leaf has the gradient that it has without scrimp."""
    other = leaf()
    f(other).backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def files(folder: Path) -> list[Path]:
    """The files of values in a folder, in the order in which they were made."""
    return sorted(folder.glob("scrimp-*/*.bytes"), key=lambda path: int(path.stem))


def stored(disk: Disk) -> tuple[Tensor, Tensor]:
    """A leaf, and a loss whose graph has four values on disk."""
    x = leaf()
    with scrimp.session(StoreAll(disk)):
        loss = chain(x)
    return x, loss
