"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

from ._plan import Change, Decision, Drop, Keep, Plan, Store
from ._simulate import Timeline, simulate
from ._solve import frontier, plan
from ._trace import Trace
from .errors import BudgetError, PlanError, ScrimpError, TraceError

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Change",
    "Decision",
    "Drop",
    "Keep",
    "Plan",
    "PlanError",
    "ScrimpError",
    "Store",
    "Timeline",
    "Trace",
    "TraceError",
    "__version__",
    "frontier",
    "plan",
    "simulate",
]
