"""What decides never imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import scrimp

PROGRAM = """
import sys, types
package = types.ModuleType("scrimp")  # without running its __init__, which is for people and has everything
package.__path__ = [sys.argv[1]]
sys.modules["scrimp"] = package
import scrimp._engine.split
import scrimp._budget, scrimp._plan, scrimp._simulate, scrimp._solve, scrimp._standing, scrimp._trace
sys.exit(any(name == "torch" or name.startswith("torch.") for name in sys.modules))
"""


def test_planning_does_not_import_torch() -> None:
    """A fresh interpreter that imports every planning module has no torch afterwards."""
    assert scrimp.__file__ is not None
    folder = str(Path(scrimp.__file__).parent)
    subprocess.run([sys.executable, "-c", PROGRAM, folder], check=True)
