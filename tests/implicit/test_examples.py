"""The examples do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_heat_finds_the_conductivity(capsys):
    """examples/heat.py recovers the constants that made the measurement."""
    runpy.run_path(str(EXAMPLES / "heat.py"), run_name="__main__")
    assert "a = 1.0000 (true 1), b = 0.5000" in capsys.readouterr().out


@pytest.mark.slow
def test_equilibrium_network_matches_its_unrolled_twin():
    """examples/deq.py trains to the accuracy of thirty recorded steps at a quarter of their memory at most."""
    train = runpy.run_path(str(EXAMPLES / "deq.py"))["train"]
    (accuracy, held), (twins, twins_held) = train(False), train(True)
    assert accuracy >= twins - 0.01
    assert accuracy >= 0.98
    assert held <= 0.25 * twins_held
