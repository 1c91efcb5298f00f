"""scrimp: a PyTorch training step that fits in the bytes you state, with bit-identical gradients."""

from scrimp import adjoints, errors, jacobian, planning, policy, solvers, store
from scrimp._budget_session import BudgetSession
from scrimp._chain import ManualChain
from scrimp._checkpoint import checkpoint
from scrimp._engine.backward import backward
from scrimp._engine.observe import Cancellation, Observer, ProgressBar
from scrimp._engine.parallel import parallel
from scrimp._engine.profile import NodeRun, NodeTotal, Profile
from scrimp._fake_trace import trace_on
from scrimp._implicit.api import argmin, fixed_point, implicit, root
from scrimp._limit import limit
from scrimp._loops.api import scan
from scrimp._loops.progress import Phase, Progress
from scrimp._plan import Plan
from scrimp._session import Session, session
from scrimp._solve import frontier, plan
from scrimp._statistics import Statistics, Tally
from scrimp._trace import Trace
from scrimp._tracing import trace
from scrimp.errors import BudgetError, ScrimpError

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "BudgetSession",
    "Cancellation",
    "ManualChain",
    "NodeRun",
    "NodeTotal",
    "Observer",
    "Phase",
    "Plan",
    "Profile",
    "Progress",
    "ProgressBar",
    "ScrimpError",
    "Session",
    "Statistics",
    "Tally",
    "Trace",
    "__version__",
    "adjoints",
    "argmin",
    "backward",
    "checkpoint",
    "errors",
    "fixed_point",
    "frontier",
    "implicit",
    "jacobian",
    "limit",
    "parallel",
    "plan",
    "planning",
    "policy",
    "root",
    "scan",
    "session",
    "solvers",
    "store",
    "trace",
    "trace_on",
]
