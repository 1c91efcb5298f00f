"""A test process that dies makes a red run, and none that waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SETTINGS = Path(__file__).parent.parent / "pyproject.toml"
_PASSES = "def test_one(): pass\ndef test_two(): pass\n"
_DIES = "import os\ndef test_dies(): os._exit(1)\n"


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    """Also one that had finished files before, which the worker in its place would wait to be given again."""
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(_DIES if number == 3 else _PASSES)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(_SETTINGS),
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run([*command, str(tmp_path)], env=outside, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "crashed while running" in run.stdout
