"""A picture of how residuals fell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .results import Info


def plot_residuals(info: Info, axes: Axes | None) -> Axes:
    """Residual norms over the steps on a logarithmic axis, a line a sample; samples that failed in red."""
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingExtraError(
                "plotting needs matplotlib, which is not installed: pip install 'scrimp[plot]'"
            ) from error
        axes = pyplot.subplots()[1]
    history = info.history.detach().cpu().flatten(1)
    for sample, good in enumerate(info.converged.cpu().flatten().tolist()):
        axes.semilogy(history[:, sample].numpy(), color="C0" if good else "C3", alpha=0.6, linewidth=1)
    if info.bound.numel():
        axes.axhline(float(info.bound.min()), color="0.5", linestyle="--", linewidth=1, label="bound")
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("residual norm")
    return axes
