"""The command line."""

import io
import subprocess
import sys
from pathlib import Path

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
    """Two runs, compared in a table and drawn: half of the memory, from the first step on."""
    console = Console(file=io.StringIO(), width=120)
    assert demo(console, steps=6, fraction=0.5)
    output = console.file.getvalue()
    assert "equal to the last bit" in output
    rows = [line.split("│") for line in output.splitlines() if "│ peak" in line]
    assert len(rows) == 2
    assert all("within" in row[4] for row in rows)
    plain, ours = (float(rows[1][column].split()[0]) for column in (2, 3))
    assert ours <= plain / 2
    assert "█" in output


def test_demo_names_the_smallest_budget_when_there_is_too_little() -> None:
    """In words, without a traceback."""
    result = CliRunner().invoke(app, ["demo", "--steps", "1", "--fraction", "0.1"])
    assert result.exit_code == 1
    assert "for optimizer state to come. Give at least that" in result.output
    assert "Traceback" not in result.output


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


STEP = """
import torch

def make():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).square().mean()

    return Step(), (torch.empty(1024, 64),)

def nothing():
    return 3
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a function that gives a model and its arguments."""
    name = f"step_{tmp_path.name}"  # modules are imported once
    (tmp_path / f"{name}.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    return name


def test_plan_draws_the_frontier_of_code_that_never_runs(step: str) -> None:
    """Without a budget, a row for each point from the smallest budget to the plain peak."""
    result = CliRunner().invoke(app, ["plan", f"{step}:make", "--points", "3"])
    assert result.exit_code == 0, result.output
    assert result.output.count("GiB │") + result.output.count("MiB │") >= 6
    assert "+0.0%" in result.output


def test_plan_saves_the_plan_and_the_trace(step: str) -> None:
    """What is saved loads, and a saved trace is planned as the code was."""
    run = CliRunner().invoke
    result = run(app, ["plan", f"{step}:make", "-b", "2MiB", "--save", "plan.json", "--save-trace", "trace.json"])
    assert result.exit_code == 0, result.output
    saved = scrimp.Plan.load("plan.json")
    assert saved.peak <= saved.budget == 2 << 20
    again = run(app, ["plan", "trace.json", "-b", str(2 << 20), "--save", "again.json"])
    assert again.exit_code == 0, again.output
    assert scrimp.Plan.load("again.json") == saved


def test_plan_may_use_stores(step: str) -> None:
    """With ``--host`` and ``--disk`` the plan is that of the function with both."""
    stores = ["--host", "1MiB", "--disk", str(3 << 20)]
    saved = ["--save", "plan.json", "--save-trace", "trace.json"]
    result = CliRunner().invoke(app, ["plan", f"{step}:make", "-b", "2MiB", *stores, *saved])
    assert result.exit_code == 0, result.output
    assert "stored" in result.output
    trace = scrimp.planning.Trace.load("trace.json")
    assert scrimp.Plan.load("plan.json") == scrimp.plan(trace, "2MiB", host="1MiB", disk="3MiB")
    assert scrimp.Plan.load("plan.json").bound_seconds < scrimp.plan(trace, "2MiB").bound_seconds


def test_plan_takes_fractions_of_the_machine(step: str) -> None:
    """A budget of 0.5 is half of the machine's memory."""
    result = CliRunner().invoke(app, ["plan", f"{step}:make", "-b", "0.5", "--machine", "t4"])
    assert result.exit_code == 0, result.output
    assert "7.50 GiB" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:make", "-b", "1kB"], "smallest budget"),
        (["{}:make", "-b", "many"], "Cannot read"),
        (["{}:missing"], "need a function 'missing'"),
        (["{}:nothing"], "to return (model, arguments)"),
        (["nowhere_to_be_found:make"], "need a module"),
        (["missing.json"], "no file"),
        (["{}"], "module:function"),
        (["{}:make", "--machine", "abacus"], "need one of the machines"),
    ],
)
def test_plan_says_what_is_wrong(step: str, arguments: list[str], message: str) -> None:
    """Errors are one message and an exit status, without a traceback."""
    result = CliRunner().invoke(app, ["plan", *(argument.format(step) for argument in arguments)])
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_plan_saves_one_plan_only(step: str) -> None:
    """Of a frontier, nobody knows which plan is meant."""
    result = CliRunner().invoke(app, ["plan", f"{step}:make", "--save", "plan.json"])
    assert result.exit_code == 2
