"""What needs a CUDA device is skipped without one."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scrimp._meter import claim_workspaces

_SPARE = 8 << 20  # bytes that libraries may keep for themselves after a test: cuDNN does for its dropout


@pytest.fixture(autouse=True)
def the_device_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which more of the device is in use than before it."""
    before = in_use()
    if torch.cuda.is_available():
        claim_workspaces(torch.device("cuda", torch.cuda.current_device()))  # so that no test's peak has them
    yield
    after = in_use()
    failed = getattr(request.node, "failed_in_its_call", False)  # then its frames are held, to be shown
    assert failed or after <= before + _SPARE, f"{(after - before) >> 20} MiB are still in use after the test"


def in_use() -> int:
    """Bytes of the device that are in use, without the workspaces of its libraries."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    gc.collect()  # what has destructors goes in two rounds
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Take note of a failure, for the fixture."""
    report = yield
    if call.when == "call" and report.failed:
        item.failed_in_its_call = True
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, and skip it where there is no device."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
