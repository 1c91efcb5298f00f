"""Solvers of fixed points and equations, and of the linear systems in their adjoints."""

from ._implicit.linear import GMRES, BiCGSTAB, Dense, LinearSolver, Neumann
from ._implicit.results import BackwardInfo, Info, WarmStart
from ._implicit.solvers import Anderson, Auto, Broyden, NewtonKrylov, Picard, Solver

__all__ = [
    "GMRES",
    "Anderson",
    "Auto",
    "BackwardInfo",
    "BiCGSTAB",
    "Broyden",
    "Dense",
    "Info",
    "LinearSolver",
    "Neumann",
    "NewtonKrylov",
    "Picard",
    "Solver",
    "WarmStart",
]
