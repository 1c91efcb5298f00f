"""The command line."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

import scrimp
from scrimp._demo import demo
from scrimp.cli import app


def test_version() -> None:
    """It prints the package's version."""
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == scrimp.__version__


def test_demo_reports_equal_losses_and_a_lower_peak() -> None:
    """Two runs of two steps, compared in a table and drawn."""
    console = Console(file=io.StringIO(), width=120)
    assert demo(console, steps=2, fraction=0.5)
    output = console.file.getvalue()
    assert "equal to the last bit" in output
    row = next(line for line in output.splitlines() if "peak of live bytes" in line)
    assert float(row.split("│")[4]) < 0.75
    assert "█" in output


def test_demo_says_when_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result does not pass for a good one."""
    monkeypatch.setattr("scrimp.cli.run_demo", lambda *_: False)
    result = CliRunner().invoke(app, ["demo", "--steps", "1"])
    assert result.exit_code == 1
    assert "bug" in result.output


def test_runs_as_a_module() -> None:
    """``python -m scrimp`` is the same program."""
    result = subprocess.run([sys.executable, "-m", "scrimp", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in result.stdout
