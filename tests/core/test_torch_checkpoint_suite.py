"""torch's own tests of checkpointing and of saved-tensor hooks, run with scrimp in the place of torch's checkpoint.

The tests are read from a checkout of PyTorch, which an environment variable names; it is not part of this project:

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
    SCRIMP_TORCH_CHECKOUT=$PWD/pytorch PYTORCH_TEST_WITH_SLOW=1 pytest -m slow tests/core/test_torch_checkpoint_suite.py
"""

import importlib
import os
import re
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import scrimp
from scrimp.policy import KeepNone

CHECKOUT = os.environ.get("SCRIMP_TORCH_CHECKOUT")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHECKOUT is None,
        reason="needs a checkout of PyTorch, have none; set SCRIMP_TORCH_CHECKOUT to its path",
    ),
    # The tests are written for torch's runner, which does not turn warnings into errors.
    pytest.mark.filterwarnings("default"),
]

REENTRANT = "asks that the reentrant variant refuses what it cannot do; scrimp has one variant, which can"
RECOMPUTES = "counts how often the function runs again; ours never does"
RAW_HOOKS = "sets hooks on a raw saved tensor, or asks for those it has; inside a session these are ours"

# Tests that ask for something else than what scrimp promises, and what that is.
MEANINGLESS = {
    "TestAutograd.test_checkpoint_detects_non_determinism": "asks for torch's message when a second run differs",
    "TestAutograd.test_checkpoint_error_suggests_mark_dynamic": "asks for torch's message when a second run differs",
    "TestAutograd.test_checkpoint_graph_execution_group": RECOMPUTES,
    "TestAutograd.test_checkpoint_valid_reset_on_error": REENTRANT,
    "TestAutograd.test_checkpoint_warns_if_use_reentrant_not_passed_explcitly": "asks for a warning of an option",
    "TestAutograd.test_checkpointing_without_reentrant_custom_function_works": (
        "asks that saved tensors can be unpacked once only; ours can be any number of times"
    ),
    "TestAutograd.test_checkpointing_without_reentrant_detached_tensor_use_reentrant_True": REENTRANT,
    "TestAutograd.test_checkpointing_without_reentrant_saved_object_identity": (
        "asks for the same Python object that was saved; scrimp promises its bits"
    ),
    "TestAutograd.test_checkpointing_without_reentrant_with_context_fn": "an option for the second run of the function",
    "TestNestedCheckpoint.test_nested_checkpoint_set_early_stop": RECOMPUTES,
    "TestNestedCheckpoint.test_nested_checkpoint_set_early_stop_no_recompution_needed": RECOMPUTES,
    "TestCheckpoint.test_checkpoint_non_tensor_inputs_outputs": REENTRANT,
    "TestCheckpoint.test_checkpoint_partial_grad": REENTRANT,
    "TestCheckpoint.test_checkpoint_trigger": RECOMPUTES,
    "TestCheckpoint.test_checkpoint_valid": REENTRANT,
    "TestAutograd.test_custom_function_saved_tensors": RAW_HOOKS,
    "TestAutograd.test_disabling_saved_tensor_hooks": "forbids hooks while a session has its hooks set",
    "TestAutograd.test_disabling_saved_tensor_hooks_nested": "forbids hooks while a session has its hooks set",
    "TestAutograd.test_get_data_and_hooks_from_raw_saved_variable": RAW_HOOKS,
    "TestAutograd.test_pack_hook_with_inplace_modification_should_fail": RAW_HOOKS,
    "TestAutograd.test_saved_tensor_hooks_extra_exit_during_bw_no_crash": RAW_HOOKS,
    "TestAutograd.test_saved_variable_packing_unpacking_did_not_save_original_with_hooks": RAW_HOOKS,
    "TestAutograd.test_saved_variable_packing_unpacking_saved_original_with_hooks": RAW_HOOKS,
    "TestAutograd.test_saved_variable_saved_original_inplace_detach": (
        "asks for a refusal after detach_(); under any saved-tensor hooks the gradient is right instead"
    ),
    "TestAutograd.test_saved_variable_version_counter": (
        "looks at a saved tensor after overwriting it; a dropped one is made again as it was"
    ),
}


def load(name: str) -> ModuleType | None:
    """One of torch's test modules; they import each other as if `test/` were the working directory."""
    if CHECKOUT is None:
        return None
    folder = str(Path(CHECKOUT, "test"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other devices, and of other versions of torch
        return importlib.import_module(name)


def cases_of(module: ModuleType | None, names: str) -> list[Any]:
    """The tests of a module whose 'Class.method' matches, except those that make no sense here."""
    if module is None:
        return []
    cases = [case for case in vars(module).values() if isinstance(case, type) and issubclass(case, unittest.TestCase)]
    found = {
        f"{case.__name__}.{method}": case(method)
        for case in cases
        for method in unittest.defaultTestLoader.getTestCaseNames(case)
    }
    return [
        pytest.param(test, id=name)
        for name, test in found.items()
        if re.fullmatch(names, name) and name not in MEANINGLESS
    ]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Scrimp's checkpoint with the signature of torch's; the options have no meaning for it."""
    return scrimp.checkpoint(function, *args, **kwargs)


@contextmanager
def scrimp_instead_of_torch(*modules: ModuleType | None) -> Iterator[None]:
    """Let torch and its tests find our checkpoint under the name of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
        for module in modules:
            patch.setattr(module, "checkpoint", checkpoint)
        yield


def run(test: unittest.TestCase) -> None:
    """Run one of torch's tests; fail with its own report, skip with its own reason."""
    result = unittest.TestResult()
    test.run(result)
    for _, report in [*result.failures, *result.errors]:
        pytest.fail(report, pytrace=False)
    for _, reason in result.skipped:
        pytest.skip(f"torch skips it: {reason}")
    assert result.testsRun == 1


AUTOGRAD = load("test_autograd")
UTILS = load("test_utils")


CHECKPOINTING = r"TestAutograd\.test_.*checkpoint.*|TestNestedCheckpoint\..*"
HOOKS = r"TestAutograd\.test_.*(saved_tensor|saved_variable|saving_variable|pack_hook|unpack_hooks|save_on_cpu).*"


@pytest.mark.parametrize("test", cases_of(AUTOGRAD, CHECKPOINTING))
def test_checkpointing(test: unittest.TestCase) -> None:
    """Checkpointing as test_autograd.py asks for it."""
    with scrimp_instead_of_torch(AUTOGRAD):
        run(test)


@pytest.mark.parametrize("test", cases_of(UTILS, r"TestCheckpoint\..*"))
def test_utilities(test: unittest.TestCase) -> None:
    """Checkpointing as test_utils.py asks for it, checkpoint_sequential included."""
    with scrimp_instead_of_torch(UTILS):
        run(test)


@pytest.mark.parametrize("test", cases_of(AUTOGRAD, HOOKS))
def test_hooks_of_others_inside_a_session(test: unittest.TestCase) -> None:
    """The hooks of others, inside of our session, do what they do without it."""
    with scrimp.session(policy=KeepNone()):
        run(test)
