"""Tests of what decides: traces, plans, simulator, solvers."""
