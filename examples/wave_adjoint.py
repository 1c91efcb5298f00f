"""The gradient of a 2-D acoustic wave simulation with respect to the speed of sound, by a hand-written adjoint.

A pulse travels through a medium; a row of receivers records it; the misfit to an earlier record is differentiated with
respect to the squared speed in every cell. Everything is NumPy. Each time step is a layer of a ``ManualChain``, which
keeps a few states in a few hundred kilobytes and computes the others again. Finite differences check the result.

Run: python examples/wave_adjoint.py [--size 48] [--steps 240] [--budget 400kB]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

import scrimp

Field = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Wave:
    """Leapfrog steps of u'' = c² Δu on a square with fixed edges; a state is the fields now and one step before."""

    squared_speed: Field
    source: Field  # one value a step, at the middle of the third row
    ratio: float = 0.25  # (time step / cell size)²

    @property
    def at_source(self) -> tuple[int, int]:
        """The cell that the pulse enters by."""
        return 3, self.squared_speed.shape[1] // 2

    def step(self, state: Field, number: int) -> Field:
        """One step forward."""
        now, before = state
        following = 2 * now - before + self.ratio * self.squared_speed * laplacian(now)
        following[self.at_source] += self.source[number]
        return np.stack([following, now])

    def adjoint(self, state: Field, grad: Field) -> tuple[Field, Field]:
        """The transposed step: gradients with respect to the state and to the squared speed."""
        by_following, by_now = grad
        spread = self.ratio * laplacian(self.squared_speed * by_following)  # the Laplacian is symmetric
        return np.stack([2 * by_following + spread + by_now, -by_following]), (
            self.ratio * laplacian(state[0]) * by_following
        )


def laplacian(u: Field) -> Field:
    """The five-point stencil, with zeros around the square."""
    padded = np.pad(u, 1)
    return padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2] - 4 * u


def ricker(steps: int) -> Field:
    """A pulse with no mean."""
    t = (np.arange(steps) - 30) / 8
    return (1 - t**2) * np.exp(-(t**2) / 2)


def misfit(wave: Wave, recorded: Field) -> float:
    """Half the squared difference to the record, with nothing kept."""
    state = np.zeros((2, *wave.squared_speed.shape))
    total = 0.0
    for number in range(len(wave.source)):
        state = wave.step(state, number)
        total += 0.5 * float(np.sum((state[0, -4] - recorded[number]) ** 2))
    return total


def misfit_and_gradient(wave: Wave, recorded: Field, chain: scrimp.ManualChain) -> tuple[float, Field]:
    """The misfit and its gradient with respect to the squared speed."""
    state = np.zeros((2, *wave.squared_speed.shape))
    steps = range(len(wave.source))
    residuals = []
    for number in steps:
        state = chain.forward(number, state, lambda s, number=number: wave.step(s, number), cost=1.0)
        residuals.append(state[0, -4] - recorded[number])
    gradient = np.zeros_like(wave.squared_speed)
    grad = np.zeros_like(state)

    def adjoint(state: Field, grad: Field) -> Field:
        by_state, by_speed = wave.adjoint(state, grad)
        np.add(gradient, by_speed, out=gradient)
        return by_state

    for number in reversed(steps):
        grad[0, -4] += residuals[number]
        grad = chain.backward(number, grad, lambda s, number=number: wave.step(s, number), adjoint)
    return 0.5 * float(sum(np.sum(one**2) for one in residuals)), gradient


def record(wave: Wave) -> Field:
    """What the receivers hear."""
    state = np.zeros((2, *wave.squared_speed.shape))
    heard = []
    for number in range(len(wave.source)):
        state = wave.step(state, number)
        heard.append(state[0, -4].copy())
    return np.array(heard)


def main(size: int = 48, steps: int = 240, budget: str = "400kB") -> float:
    """Compare the adjoint with central differences in a random direction; return the relative difference."""
    random = np.random.default_rng(0)
    source = ricker(steps)
    truth = np.ones((size, size))
    truth[size // 2 - 4 : size // 2 + 4, size // 2 - 4 : size // 2 + 4] = 0.7
    recorded = record(Wave(truth, source))
    guess = np.ones((size, size))

    chain = scrimp.ManualChain(budget=budget)
    loss, gradient = misfit_and_gradient(Wave(guess, source), recorded, chain)
    direction, eps = random.standard_normal((size, size)), 1e-5
    difference = (
        misfit(Wave(guess + eps * direction, source), recorded)
        - misfit(Wave(guess - eps * direction, source), recorded)
    ) / (2 * eps)
    along = float(np.sum(gradient * direction))
    error = abs(along - difference) / abs(difference)

    seen = chain.statistics()
    print(f"misfit {loss:.6f}; along a random direction: adjoint {along:.9f}, finite differences {difference:.9f}")
    print(f"relative difference {error:.1e}")
    print(
        f"kept {seen.kept.peak_bytes / 1e3:.0f} kB of {steps * 2 * size * size * 8 / 1e3:.0f} kB at most; "
        f"{seen.replayed_operators} steps computed again to reverse {steps}"
    )
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--budget", default="400kB")
    main(**vars(parser.parse_args()))
