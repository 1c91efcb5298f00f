"""Spectral radii, penalties, warm starts, progress and pictures."""

from __future__ import annotations

import builtins

import pytest
import torch

import scrimp
from scrimp.errors import MissingExtraError
from scrimp.jacobian import Arnoldi, NormGrowth, jacobian_penalty, spectral_radius
from scrimp.solvers import WarmStart

DOUBLE = torch.float64


@pytest.mark.parametrize(("method", "tolerance"), [(Arnoldi(), 0.02), (NormGrowth(200), 0.05)])
def test_spectral_radius_of_a_complex_spectrum(method, tolerance):
    """Both methods see through a spectrum without real eigenvalues of its size."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(5, 20, 20, dtype=DOUBLE, generator=generator)
    expected = torch.linalg.eigvals(matrices).abs().amax(1)
    found = spectral_radius(
        lambda x: torch.einsum("bij,bj->bi", matrices, x),
        torch.zeros(5, 20, dtype=DOUBLE),
        batch_dims=1,
        method=method,
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


def test_backward_estimates_the_spectral_radius():
    """GMRES's own Arnoldi matrix gives the radius without further products."""
    slopes = torch.tensor([[0.9, 0.1, -0.3], [0.2, -0.5, 0.1]], dtype=DOUBLE)
    c = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
    x, info = scrimp.fixed_point(lambda x: slopes * x + c, torch.zeros(2, 3, dtype=DOUBLE), batch_dims=1)
    assert info.backward is None
    x.sum().backward()
    torch.testing.assert_close(info.backward.spectral_radius, torch.tensor([0.9, 0.5], dtype=DOUBLE))


def test_jacobian_penalty_estimates_the_frobenius_norm():
    """Averaged over many vectors the penalty is the squared norm over the size, per sample."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, 6, 6, dtype=DOUBLE, generator=generator)
    found = jacobian_penalty(
        lambda x: torch.einsum("bij,bj->bi", matrices, x),
        torch.zeros(2, 6, dtype=DOUBLE), batch_dims=1, samples=4000, generator=generator,
    )  # fmt: skip
    torch.testing.assert_close(found, matrices.square().sum((1, 2)) / 6, rtol=0.05, atol=0)


def test_jacobian_penalty_has_a_gradient():
    """The penalty of x ↦ a·x is a², whose derivative reaches a."""
    a = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    penalty = jacobian_penalty(lambda x: a * x, torch.zeros(8, dtype=DOUBLE), samples=3, generator=generator)
    (found,) = torch.autograd.grad(penalty, a)
    torch.testing.assert_close(found, 2 * penalty.detach() / a.detach())


def test_warm_start_saves_work_and_keeps_the_result():
    """The second call with the same warm start needs fewer evaluations and products, and finds the same."""
    torch.manual_seed(0)
    W, c = torch.randn(8, 8, dtype=DOUBLE) * 0.2, torch.randn(4, 8, dtype=DOUBLE, requires_grad=True)
    warm = WarmStart()

    def call():
        x, info = scrimp.fixed_point(
            lambda x: torch.tanh(x @ W + c), torch.zeros(4, 8, dtype=DOUBLE), batch_dims=1, warm=warm
        )
        return torch.autograd.grad(x.sum(), c)[0], info

    cold_gradient, cold = call()
    warm_gradient, again = call()
    assert again.total_evaluations <= 3 < cold.total_evaluations
    assert again.backward.vjps <= 2 < cold.backward.vjps
    torch.testing.assert_close(warm_gradient, cold_gradient, rtol=1e-8, atol=1e-9)


def test_warm_start_of_another_shape_is_not_used():
    """A remembered state that does not fit is passed over."""
    warm = WarmStart()
    for size in (3, 5):
        x, info = scrimp.fixed_point(lambda x: torch.cos(x), torch.ones(size), warm=warm)
        assert info.all_converged
        assert x.shape == (size,)


def test_progress_hears_every_step():
    """The callback gets the number of each step and the residuals that the record shows."""
    heard = []
    _, info = scrimp.fixed_point(
        lambda x: torch.cos(x), torch.zeros(3), batch_dims=1,
        progress=lambda step, residual: heard.append((step, residual.clone())),
    )  # fmt: skip
    assert [step for step, _ in heard] == list(range(len(info.history)))
    assert torch.equal(torch.stack([residual for _, residual in heard]), info.history)


def test_plot_draws_a_line_for_each_sample():
    """The picture has one line a sample and one for the bound."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    _, info = scrimp.fixed_point(lambda x: torch.cos(x), torch.zeros(3), batch_dims=1)
    axes = info.plot()
    assert len(axes.lines) == 4
    matplotlib.pyplot.close(axes.figure)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    """Without matplotlib the error names the extra."""
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    _, info = scrimp.fixed_point(lambda x: torch.cos(x), torch.zeros(3))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"scrimp\[plot\]"):
        info.plot()
