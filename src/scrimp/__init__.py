"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

from scrimp import errors, policy
from scrimp._checkpoint import checkpoint
from scrimp._session import Session, session
from scrimp._statistics import Statistics, Tally
from scrimp.errors import ScrimpError

__version__ = "0.1.0"

__all__ = [
    "ScrimpError",
    "Session",
    "Statistics",
    "Tally",
    "__version__",
    "checkpoint",
    "errors",
    "policy",
    "session",
]
