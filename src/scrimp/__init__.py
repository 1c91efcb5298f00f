"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

from scrimp._engine.backward import backward
from scrimp._engine.observe import Cancellation, Observer, ProgressBar
from scrimp._engine.parallel import parallel
from scrimp._engine.profile import NodeRun, NodeTotal, Profile
from scrimp.errors import (
    BackwardCancelledError,
    BackwardError,
    BranchError,
    GradientMismatchError,
    GraphFreedError,
    LateGradientError,
    ScrimpError,
    StackableBranchesWarning,
)

__version__ = "0.1.0"

__all__ = [
    "BackwardCancelledError",
    "BackwardError",
    "BranchError",
    "Cancellation",
    "GradientMismatchError",
    "GraphFreedError",
    "LateGradientError",
    "NodeRun",
    "NodeTotal",
    "Observer",
    "Profile",
    "ProgressBar",
    "ScrimpError",
    "StackableBranchesWarning",
    "__version__",
    "backward",
    "parallel",
]
