"""Layers with hand-written adjoints, and runs of them."""

from __future__ import annotations

import numpy as np

from scrimp import ManualChain

LAYERS = 12


def square_forward(x):
    """A layer: x² + x/2."""
    return x * x + 0.5 * x


def square_backward(x, grad):
    """Its adjoint."""
    return (2 * x + 0.5) * grad


def run(chain: ManualChain, layers: int = LAYERS) -> np.ndarray:
    """Forward and backward through a chain; the gradient with respect to its input."""
    x = np.linspace(0.1, 0.3, 5)
    for layer in range(layers):
        x = chain.forward(layer, x, square_forward)
    grad = np.ones(5)
    for layer in reversed(range(layers)):
        grad = chain.backward(layer, grad, square_forward, square_backward)
    return grad


def plain() -> np.ndarray:
    """The same with everything kept by hand."""
    xs = [np.linspace(0.1, 0.3, 5)]
    for _ in range(LAYERS):
        xs.append(square_forward(xs[-1]))
    grad = np.ones(5)
    for x in reversed(xs[:-1]):
        grad = square_backward(x, grad)
    return grad
