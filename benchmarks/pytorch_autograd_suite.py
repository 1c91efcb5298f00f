"""Run PyTorch's own autograd tests with its backward replaced by ``scrimp.backward``, and say what changed.

    python benchmarks/pytorch_autograd_suite.py CHECKOUT [--order depth-first] [--workers 2] [--only EXPRESSION]

CHECKOUT is a PyTorch source tree of about the installed version; nothing of it is copied. Its file
``test/test_autograd.py`` is run twice, plain and replaced, in processes of their own. A test is lost when it passes
plainly and does not with ours, and is none of those that ask for something else than what scrimp promises.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

_ORDER_VARIABLE = "SCRIMP_SUITE_ORDER"
_WORKERS_VARIABLE = "SCRIMP_SUITE_WORKERS"

# Tests that ask for something else than what scrimp promises, and what that is.
EXPLAINED: dict[str, str] = {
    "TestAutograd.test_backward_with_inputs": (
        "passes a float32 gradient to a float64 root, which PyTorch converts silently and scrimp refuses"
    ),
}


def pytest_configure() -> None:
    """As a pytest plugin: replace both entries to PyTorch's backward."""
    order = os.environ.get(_ORDER_VARIABLE)
    if order:
        _replace(order, int(os.environ[_WORKERS_VARIABLE]))


def _replace(order: str, workers: int) -> None:
    import torch

    import scrimp

    def autograd_backward(
        tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None
    ):
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        scrimp.backward(tensors, grad_tensors, order=order, workers=workers, **options)

    def tensor_backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    torch.autograd.backward = autograd_backward
    torch.Tensor.backward = tensor_backward


def _outcomes(checkout: Path, order: str, workers: int, only: str | None) -> dict[str, str]:
    """Each test's outcome, by name."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            Path(__file__).stem,
            f"--junitxml={report}",
        ]
        command += [
            "-p",
            "no:logging",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--noconftest",
            "-c",
            os.devnull,
            "--rootdir",
            str(checkout / "test"),
        ]
        command += ["-k", only] if only else []
        environment = dict(os.environ)
        environment[_ORDER_VARIABLE] = order
        environment[_WORKERS_VARIABLE] = str(workers)
        paths = [str(here), str(here.parent / "src"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        subprocess.run(
            [*command, "test_autograd.py"],
            cwd=checkout / "test",
            env=environment,
            check=False,
            stdout=subprocess.DEVNULL,
        )
        return {_name(case): _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}.{case.get('name')}"


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"failed: {(child.get('message') or '').splitlines()[0][:150]}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--order", default="torch", choices=["torch", "depth-first", "memory"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", help="a pytest -k expression")
    arguments = parser.parse_args()
    if not (arguments.checkout / "test" / "test_autograd.py").is_file():
        sys.exit(f"{arguments.checkout} needs to be a PyTorch checkout with test/test_autograd.py, and is not.")
    plain = _outcomes(arguments.checkout, "", 1, arguments.only)
    ours = _outcomes(arguments.checkout, arguments.order, arguments.workers, arguments.only)
    for title, outcomes in (("plain", plain), ("scrimp", ours)):
        print(title, dict(Counter(outcome.partition(":")[0] for outcome in outcomes.values())))
    reasons = Counter(outcome[:100] for outcome in plain.values() if outcome.startswith("failed"))
    for reason, count in reasons.most_common(12):
        print(f"plain, too: {count} x {reason}")
    lost = {name for name, outcome in plain.items() if outcome == "passed" and ours.get(name) != "passed"}
    explained = {name: EXPLAINED[test] for name in lost if (test := name.partition(".")[2]) in EXPLAINED}
    for name, reason in sorted(explained.items()):
        print(f"explained: {name} {reason}")
    lost -= explained.keys()
    for name in sorted(lost):
        print(f"LOST {name}\n     {ours.get(name, 'not run')}")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
