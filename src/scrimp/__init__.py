"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

from . import adjoints, errors, jacobian, solvers
from ._implicit.api import argmin, fixed_point, implicit, root
from .errors import ScrimpError

__version__ = "0.1.0"

__all__ = [
    "ScrimpError",
    "__version__",
    "adjoints",
    "argmin",
    "errors",
    "fixed_point",
    "implicit",
    "jacobian",
    "root",
    "solvers",
]
