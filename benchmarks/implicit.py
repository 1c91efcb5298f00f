"""Fixed points beside other libraries: evaluations, gradient error and CPU time, interleaved in one run.

    pip install torchdeq jaxopt optimistix
    python benchmarks/implicit.py [--n 512] [--batch 256] [--rounds 7] [--jax]

The layer is x = tanh(W x + U p + b), in single precision with tolerance 1e-6, W scaled so that the largest
spectral radius of the samples' Jacobians at the solution is that of the column; "complex" is a Gaussian W, "real"
a symmetric one with eigenvalues spread evenly over both signs. What this makes of W's own radius is printed; the
two differ by what tanh flattens. The error is that of the gradient in p against a dense solve in double precision;
a result with more than FAILED of it counts as failed. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import scrimp
from scrimp.adjoints import Implicit
from scrimp.solvers import Anderson, BiCGSTAB, Broyden

Solve = Callable[[Callable[[Tensor], Tensor], Tensor], tuple[Tensor, object]]

COLUMNS = [("complex", 0.5), ("complex", 0.9), ("complex", 0.99), ("real", 0.9), ("real", 0.99)]
CHECKED = 2
TOLERANCE = 1e-6
FAILED = 1e-4
PATIENT = 2000


@dataclass(frozen=True)
class Layer:
    """The problem in single precision, and the exact gradient in the first samples of p."""

    W: Tensor
    U: Tensor
    b: Tensor
    p: Tensor
    cotangent: Tensor
    exact: Tensor


@dataclass(frozen=True)
class Outcome:
    """One forward and backward pass."""

    seconds: float
    evaluations: str
    error: float
    said: bool


def make_layer(spectrum: str, radius: float, n: int, batch: int) -> Layer:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if spectrum == "complex":
        W = normal(n, n) / n**0.5
    else:
        basis = torch.linalg.qr(normal(n, n)).Q
        W = basis @ torch.diag(torch.linspace(-1, 1, n, dtype=torch.float64)) @ basis.T
    U, b, p = normal(n, n) / n**0.5, normal(n) * 0.1, normal(batch, n) * 0.1
    W = W * radius / torch.linalg.eigvals(W).abs().max()
    x = torch.zeros_like(p)
    for _ in range(6):
        x = dense_solution(W, U, b, p, x)
        # All eigenvalues of all samples would take hours: those of the samples that look worst will do.
        worst = growth(W, 1 - x**2).topk(CHECKED).indices
        W = W * radius / torch.linalg.eigvals((1 - x[worst] ** 2).unsqueeze(2) * W).abs().max()
    # The samples that are checked come first.
    order = torch.cat([worst, torch.tensor([i for i in range(batch) if i not in worst.tolist()])])
    p, x = p[order], dense_solution(W, U, b, p, x)[order]
    radii = growth(W, 1 - x**2)
    print(
        f"\n{spectrum} {radius}: spectral radius {torch.linalg.eigvals(W).abs().max():.3f} of W, "
        f"{radii.min():.3f} to {radii.max():.3f} of the Jacobians",
        flush=True,
    )
    cotangent = normal(batch, n)
    slope = 1 - x[:CHECKED] ** 2
    system = torch.eye(n, dtype=torch.float64) - slope.unsqueeze(2) * W
    v = torch.linalg.solve(system.mT, cotangent[:CHECKED].unsqueeze(2)).squeeze(2)
    return Layer(*(t.float() for t in (W, U, b, p, cotangent)), exact=(v * slope) @ U)


def growth(W: Tensor, slope: Tensor, steps: int = 400) -> Tensor:
    """How fast products with each sample's Jacobian grow: an estimate of its spectral radius."""
    v, total = torch.ones_like(slope), torch.zeros_like(slope[:, 0])
    for step in range(steps):
        v = slope * (v @ W.T)
        length = v.norm(dim=1, keepdim=True)
        v = v / length
        total += length.squeeze(1).log() * (step >= steps // 2)
    return (total / (steps - steps // 2)).exp()


def dense_solution(W: Tensor, U: Tensor, b: Tensor, p: Tensor, x: Tensor) -> Tensor:
    """Every sample's solution by a rough plain iteration from ``x`` and Newton's method with dense matrices."""
    eye, offset = torch.eye(W.shape[0], dtype=W.dtype), p @ U.T + b
    for _ in range(300):
        x = torch.tanh(x @ W.T + offset)
    for rows in torch.arange(len(x)).split(32):
        for _ in range(12):
            fx = torch.tanh(x[rows] @ W.T + offset[rows])
            change = torch.linalg.solve(eye - (1 - fx**2).unsqueeze(2) * W, (fx - x[rows]).unsqueeze(2)).squeeze(2)
            x[rows] = x[rows] + change
            if float(change.abs().max()) < 1e-14:
                break
    return x


def torch_run(layer: Layer, solve: Callable[[Callable[[Tensor], Tensor], Tensor], tuple[Tensor, object]]) -> Outcome:
    """Time a solver that takes f and x0; counts calls of f, and of backward through it."""
    W, U, b, p = (t.clone().requires_grad_() for t in (layer.W, layer.U, layer.b, layer.p))
    counts = [0, 0]

    def count_backward(gradient: Tensor) -> None:
        counts[1] += 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.process_time()
        offset = p @ U.T + b

        def f(x: Tensor) -> Tensor:
            counts[0] += 1
            y = torch.tanh(x @ W.T + offset)
            if y.requires_grad:
                y.register_hook(count_backward)
            return y

        x, _ = solve(f, torch.zeros_like(layer.p))
        (x * layer.cotangent).sum().backward()
        seconds = time.process_time() - began
    found = p.grad[:CHECKED].double()
    error = float((found - layer.exact).norm() / layer.exact.norm())
    said = any("scrimp" in w.category.__module__ for w in caught)
    # The pass that carries the gradient on to the parameters is made by every method, and counts in none.
    return Outcome(seconds, f"{counts[0]}/{counts[1] - 1}", error, said)


def scrimp_methods() -> dict[str, Callable[[Layer], Outcome]]:
    variants = {
        "scrimp Auto": {},
        "scrimp Anderson(8)": {"solver": Anderson(8)},
        "scrimp Broyden(30)": {"solver": Broyden(30)},
        "scrimp Auto, BiCGSTAB": {"adjoint": Implicit(BiCGSTAB())},
    }

    def method(options: dict[str, object]) -> Callable[[Layer], Outcome]:
        return lambda layer: torch_run(
            layer, lambda f, x0: scrimp.fixed_point(f, x0, batch_dims=1, rtol=TOLERANCE, **options)
        )

    return {name: method(options) for name, options in variants.items()}


def torchdeq_methods() -> dict[str, Callable[[Layer], Outcome]]:
    from torchdeq import get_deq

    def method(solver: str) -> Callable[[Layer], Outcome]:
        limits = {"f_max_iter": 200, "b_max_iter": 200, "f_tol": TOLERANCE, "b_tol": TOLERANCE}
        # Broyden's method holds all its steps, at most 200; the others may take what they need.
        if solver != "broyden":
            limits |= {"f_max_iter": PATIENT, "b_max_iter": PATIENT}
        modes = {"f_stop_mode": "rel", "b_stop_mode": "rel", "ift": True}
        deq = get_deq(f_solver=solver, b_solver=solver, **limits, **modes)

        def solve(f: Callable[[Tensor], Tensor], x0: Tensor) -> tuple[Tensor, object]:
            states, info = deq(f, x0)
            return states[-1], info

        return lambda layer: torch_run(layer, solve)

    return {f"torchdeq {solver}": method(solver) for solver in ("fixed_point_iter", "anderson", "broyden")}


def jax_methods() -> dict[str, Callable[[Layer], Outcome]]:
    import jax
    import jax.numpy as jnp
    import jaxopt
    import numpy as np
    import optimistix

    def layer_map(x, weights):
        W, offset = weights
        return jnp.tanh(x @ W.T + offset)

    def by_jaxopt(x0, weights):
        return jaxopt.FixedPointIteration(layer_map, maxiter=200, tol=TOLERANCE).run(x0, weights).params

    def by_anderson(x0, weights):
        solver = jaxopt.AndersonAcceleration(layer_map, history_size=8, maxiter=200, tol=TOLERANCE)
        return solver.run(x0, weights).params

    def by_optimistix(x0, weights):
        solver = optimistix.FixedPointIteration(rtol=TOLERANCE, atol=TOLERANCE)
        return optimistix.fixed_point(layer_map, solver, x0, args=weights, max_steps=200, throw=False).value

    def method(solve) -> Callable[[Layer], Outcome]:
        def loss(W, U, b, p, cotangent):
            return (solve(jnp.zeros_like(p), (W, p @ U.T + b)) * cotangent).sum()

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

        def run(layer: Layer) -> Outcome:
            inputs = [jnp.asarray(t.numpy()) for t in (layer.W, layer.U, layer.b, layer.p, layer.cotangent)]
            began = time.process_time()
            found = jax.block_until_ready(gradient(*inputs))[3]
            seconds = time.process_time() - began
            checked = torch.from_numpy(np.array(found[:CHECKED])).double()
            error = float((checked - layer.exact).norm() / layer.exact.norm())
            return Outcome(seconds, "–", error, False)

        return run

    names = {"jaxopt Picard": by_jaxopt, "jaxopt Anderson": by_anderson, "optimistix Picard": by_optimistix}
    return {name: method(solve) for name, solve in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jax", action="store_true", help="time the peers on JAX too, which takes long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = scrimp_methods()
    if importlib.util.find_spec("torchdeq"):
        methods |= torchdeq_methods()
    if options.jax and importlib.util.find_spec("jaxopt") and importlib.util.find_spec("optimistix"):
        methods |= jax_methods()
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, n={options.n}, batch={options.batch}")
    for spectrum, radius in COLUMNS:
        layer = make_layer(spectrum, radius, options.n, options.batch)
        outcomes: dict[str, list[Outcome]] = {name: [] for name in methods}
        for _ in range(options.rounds + 1):
            for name, method in methods.items():
                outcomes[name].append(method(layer))
        # The first round warms up.
        report({name: runs[1:] for name, runs in outcomes.items()})


def report(outcomes: dict[str, list[Outcome]]) -> None:
    """A line for each method, and how the best peer that found the gradient compares; times as ratios in one round."""
    ratios = {
        name: statistics.median(
            run.seconds / ours.seconds for run, ours in zip(runs, outcomes["scrimp Auto"], strict=True)
        )
        for name, runs in outcomes.items()
    }
    for name, runs in outcomes.items():
        last, seconds = runs[-1], statistics.median(run.seconds for run in runs)
        note = ("  warned" if last.said else "") + ("" if last.error <= FAILED else "  FAILED")
        print(f"  {name:26} {last.evaluations:>9} {last.error:8.1e} {seconds:7.3f} s {ratios[name]:6.2f}×{note}")
    solved = [name for name, runs in outcomes.items() if name.startswith("torchdeq") and runs[-1].error <= FAILED]
    if solved:
        best = min(solved, key=lambda name: ratios[name])
        print(f"  the fastest of torchdeq that found it, {best}, took {ratios[best]:.2f} of Auto's time", flush=True)


if __name__ == "__main__":
    main()
