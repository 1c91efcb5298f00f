"""What the Jacobian of a map is like at a state: its spectral radius, and a penalty that keeps it small."""

from ._implicit.curvature import Arnoldi, NormGrowth, jacobian_penalty, spectral_radius

__all__ = ["Arnoldi", "NormGrowth", "jacobian_penalty", "spectral_radius"]
