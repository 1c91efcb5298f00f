"""Traces and plans as data, and the simulator that judges them. None of it needs torch."""

from scrimp._machine import MACHINES, Machine
from scrimp._plan import Change, Decision, Drop, Keep, Plan, Store
from scrimp._simulate import Timeline, simulate
from scrimp._solve import frontier, plan
from scrimp._trace import Event, Op, Release, Resident, Run, Trace, Unpack, Value

__all__ = [
    "MACHINES",
    "Change",
    "Decision",
    "Drop",
    "Event",
    "Keep",
    "Machine",
    "Op",
    "Plan",
    "Release",
    "Resident",
    "Run",
    "Store",
    "Timeline",
    "Trace",
    "Unpack",
    "Value",
    "frontier",
    "plan",
    "simulate",
]
