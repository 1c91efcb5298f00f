"""Run PyTorch's own autograd tests with its backward replaced by ``scrimp.backward``, and say what changed.

    python benchmarks/pytorch_autograd_suite.py CHECKOUT [WAY ...] [--only EXPRESSION]

CHECKOUT is a PyTorch source tree of about the installed version; nothing of it is copied. Its file
``test/test_autograd.py`` is run plainly and once for each WAY (all of them, if none is named), in processes of their
own. With several workers each test runs twice: the first run of a graph is measured, the second may be in threads.
A test is lost when it passes plainly and does not with ours, and is none of those that ask for something else than
what scrimp promises.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_WAY_VARIABLE = "SCRIMP_SUITE_WAY"
_CUTS_VARIABLE = "SCRIMP_SUITE_CUTS"


def _observed() -> dict[str, Any]:
    import scrimp

    return {"observer": scrimp.Profile()}


# How each backward of the suite is run: the options of a pass.
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": dict,
    "observed": _observed,
    "reported": lambda: {"on_leaf_grad_ready": lambda leaf, gradient: None},
    "workers-1": lambda: {"workers": 1},
    "workers-2": lambda: {"workers": 2},
    "workers-4": lambda: {"workers": 4},
    "depth-first": lambda: {"order": "depth-first"},
    "memory": lambda: {"order": "memory"},
}
_THREADED = ("workers-2", "workers-4")

_HOOKED = (
    "wants nothing to hold what a node received while it runs, and hooks after the node, which observers and a pass "
    "that is measured need, do"
)

# Tests that ask for something else than what scrimp promises: in which ways, and what that is.
EXPLAINED: dict[str, tuple[frozenset[str], str]] = {
    "TestAutograd.test_backward_with_inputs": (
        frozenset(WAYS),
        "passes a float32 gradient to a float64 root, which PyTorch converts silently and scrimp refuses",
    ),
    "TestAutograd.test_custom_function_boxed_grads_no_extra_refs": (
        frozenset({"observed", *_THREADED}),
        _HOOKED,
    ),
    "TestAutograd.test_node_post_hook_registered_during_unpack_hook": (frozenset({"observed"}), _HOOKED),
    "TestAutograd.test_profiler_seq_nr": (
        frozenset({"depth-first", "memory"}),
        "reads sequence numbers while the pass runs, and an order is imposed by these",
    ),
}


def pytest_configure() -> None:
    """As a pytest plugin: replace both entries to PyTorch's backward."""
    way = os.environ.get(_WAY_VARIABLE)
    if way:
        _replace(WAYS[way])
    if way in _THREADED:
        _count_cuts(Path(os.environ[_CUTS_VARIABLE]))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Run each test twice where the first run teaches the second, but for those that load C++, which goes once."""
    if os.environ.get(_WAY_VARIABLE) in _THREADED:
        items[:] = [item for item in items for _ in range(1 if _loads_cpp(item) else 2)]


def _loads_cpp(item: Any) -> bool:
    return "load_inline" in inspect.getsource(inspect.unwrap(item.function))


def _replace(options: Callable[[], dict[str, Any]]) -> None:
    import torch

    import scrimp

    def autograd_backward(
        tensors, grad_tensors=None, retain_graph=None, create_graph=False, grad_variables=None, inputs=None
    ):
        asked = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        scrimp.backward(tensors, grad_tensors, **asked, **options())

    def tensor_backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    torch.autograd.backward = autograd_backward
    torch.Tensor.backward = tensor_backward


def _count_cuts(note: Path) -> None:
    """Note every pass that runs in threads, one byte each."""
    from scrimp._engine import threaded

    run_all = threaded._Parts.run_all

    def noted(self: Any, *rest: Any) -> None:
        with note.open("a") as file:
            file.write(".")
        run_all(self, *rest)

    threaded._Parts.run_all = noted


def _outcomes(checkout: Path, way: str, only: str | None) -> tuple[dict[str, str], int]:
    """Each test's outcome, by name, and how many passes ran in threads."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report, cuts = Path(folder, "report.xml"), Path(folder, "cuts")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", f"--junitxml={report}", "--noconftest"]
        for plugin in (Path(__file__).stem, "no:logging", "no:cacheprovider", "no:xdist"):
            command += ["-p", plugin]
        command += ["-c", os.devnull, "--rootdir", str(checkout / "test")]
        command += ["-k", only] if only else []
        environment = dict(os.environ) | {_WAY_VARIABLE: way, _CUTS_VARIABLE: str(cuts)}
        paths = [str(here), str(here.parent / "src"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        subprocess.run(
            [*command, "test_autograd.py"],
            cwd=checkout / "test",
            env=environment,
            check=False,
            stdout=subprocess.DEVNULL,
        )
        found: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            if found.get(name, "passed") == "passed":  # of two runs the worse
                found[name] = _outcome(case)
        return found, cuts.stat().st_size if cuts.exists() else 0


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return f"failed: {(child.get('message') or '').splitlines()[0][:150]}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def _lost(way: str, plain: dict[str, str], checkout: Path, only: str | None) -> set[str]:
    """Run the suite one way, print what differs; the tests that are lost without a reason."""
    ours, cuts = _outcomes(checkout, way, only)
    in_threads = f", {cuts} passes in threads" if way in _THREADED else ""
    print(f"{way}: {_counts(ours)}{in_threads}", flush=True)
    lost = {name for name, outcome in plain.items() if outcome == "passed" and ours.get(name) != "passed"}
    explained = {name: reason for name in lost if (reason := _reason(name, way)) is not None}
    for name, reason in sorted(explained.items()):
        print(f"  explained: {name} {reason}")
    lost -= explained.keys()
    for name in sorted(lost):
        print(f"  LOST {name}\n       {ours.get(name, 'not run')}", flush=True)
    return lost


def _reason(name: str, way: str) -> str | None:
    ways, reason = EXPLAINED.get(name.partition(".")[2], (frozenset(), ""))
    return reason if way in ways else None


def _counts(outcomes: dict[str, str]) -> dict[str, int]:
    return dict(Counter(outcome.partition(":")[0] for outcome in outcomes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("ways", nargs="*", metavar="WAY", choices=[*WAYS, []], help=", ".join(WAYS))
    parser.add_argument("--only", help="a pytest -k expression")
    arguments = parser.parse_args()
    if not (arguments.checkout / "test" / "test_autograd.py").is_file():
        sys.exit(f"{arguments.checkout} needs to be a PyTorch checkout with test/test_autograd.py, and is not.")
    plain, _ = _outcomes(arguments.checkout, "", arguments.only)
    print(f"plain: {_counts(plain)}", flush=True)
    for name, outcome in sorted(plain.items()):
        if outcome.startswith("failed"):
            print(f"  plain, too: {name} {outcome[:100]}")
    lost = [_lost(way, plain, arguments.checkout, arguments.only) for way in arguments.ways or WAYS]
    sys.exit(any(lost))


if __name__ == "__main__":
    main()
