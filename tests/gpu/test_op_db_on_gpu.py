"""A sample of torch's own operator database on a GPU, bit for bit against plain torch.

Run with ``-s`` to see the summary.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scrimp.policy import KeepNone
from scrimp.testing import NondeterministicStepError, Step, assert_same_step

SAMPLES = 2
_RUNS = 30

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def load(name: str) -> ModuleType:
    """A module of the suite for the CPU, whose steps and comparisons serve here too."""
    path = Path(__file__).parents[1] / "core" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"core_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bits can only be compared where the step repeats."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_are_exact(dtype: torch.dtype) -> None:
    """The first samples of each operator, with everything dropped and with a random half dropped."""
    database, policies = load("test_op_db"), load("conftest")
    passed, unjudged, failed = 0, dict[str, str](), dict[str, str]()
    for name, op in database.OPERATORS.items():
        if name in database.EXCLUDED or dtype not in database.dtypes_of(op, "cuda"):
            continue
        try:
            judge(database, policies, op, dtype)
            passed += 1
        except (NondeterministicStepError, torch.OutOfMemoryError) as error:
            unjudged[name] = summary(error)
        except Exception as error:
            failed[name] = summary(error)
    print(f"\n{dtype}: {passed} operators are exact, {len(unjudged)} could not be judged, {len(failed)} failed")
    for title, names in (("not judged", unjudged), ("FAILED", failed)):
        for name, why in names.items():
            print(f"  {title}: {name}: {why}")
    assert not failed
    assert passed > 300


def judge(database: Any, policies: Any, op: Any, dtype: torch.dtype) -> None:
    """Compare an operator's first samples under two policies; where torch itself refuses, there is nothing to do."""
    for index, sample in enumerate(database.samples_of(op, dtype, SAMPLES, "cuda")):
        try:
            step = database.make_step(op, sample)
            step.backward(step.forward())
        except (
            RuntimeError,
            IndexError,
        ) as error:  # the latter where deterministic kernels meet tensors without dimensions
            raise NondeterministicStepError(f"plain torch refuses: {error}") from error
        random = functools.partial(policies.RandomPolicy, index)
        try:
            database.assert_operator_is_exact(op, sample, KeepNone, random)
        except AssertionError:
            assert_repeats(functools.partial(database.make_step, op, sample))
            raise


def assert_repeats(make_step: Callable[[], Step]) -> None:
    """Say of a step that adds by atomics, which two runs seldom show, that it cannot be judged."""
    for _ in range(_RUNS):
        try:
            assert_same_step(make_step, nullcontext)
        except AssertionError as error:
            raise NondeterministicStepError(f"one of many plain runs differs: {error}") from error


def summary(error: Exception) -> str:
    """The first lines of an error, and the sample it came from."""
    return " ".join([type(error).__name__, *str(error).split()[:60], *getattr(error, "__notes__", ())])[:700]
