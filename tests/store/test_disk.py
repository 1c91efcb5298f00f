"""Values in files: exact, checked, and never left behind."""

import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import scrimp
from scrimp.errors import StoreError, StoreWarning
from scrimp.policy import StoreAll
from scrimp.store import Disk
from scrimp.testing import Step, assert_same_step

from .steps import assert_right, files, leaf, stored

SIZE = 64 * 64 * 4


def test_the_comparison_can_fail() -> None:
    """A leaf with another gradient is told apart."""
    x = leaf()
    x.exp().sum().backward()
    with pytest.raises(AssertionError):
        assert_right(x)


@pytest.mark.parametrize("window", [1, "1MiB"], ids=["one at a time", "all at once"])
def test_a_step_is_exact(tmp_path: Path, window: int | str) -> None:
    """Every bit of a step with views, masks and draws is that of the plain one."""
    disk = Disk(tmp_path, window=window)

    def make_step() -> Step:
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(), torch.nn.Linear(32, 4)
        )
        x = torch.randn(8, 16, requires_grad=True)
        return Step(lambda: model(x.t().contiguous().t() * 2)[::2].square().mean(), state=(model, x))

    assert_same_step(make_step, lambda: scrimp.session(StoreAll(disk)))
    assert disk.statistics.held.total > 4
    assert disk.statistics.held.bytes == 0
    assert files(tmp_path) == []


def test_files_hold_bytes_and_nothing_else(tmp_path: Path) -> None:
    """Raw content, readable by its owner alone."""
    x = leaf()
    with scrimp.session(StoreAll(Disk(tmp_path))):
        y = x.exp()
    (file,) = files(tmp_path)
    assert torch.equal(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32).view(64, 64), y)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_statistics(tmp_path: Path) -> None:
    """Bytes each way, and how fast they went."""
    disk = Disk(tmp_path)
    x, loss = stored(disk)
    assert disk.statistics.held.bytes == 4 * SIZE
    loss.backward()
    assert_right(x)
    after = disk.statistics
    assert (after.held.bytes, after.bytes_out, after.bytes_in) == (0, 4 * SIZE, 4 * SIZE)
    assert min(after.out_bandwidth, after.in_bandwidth, after.waited_seconds) > 0


def test_backward_again(tmp_path: Path) -> None:
    """With ``retain_graph`` files are read in each pass."""
    disk = Disk(tmp_path)
    x, loss = stored(disk)
    loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert_right(x)
    del loss
    assert files(tmp_path) == []


def test_backward_never_run(tmp_path: Path) -> None:
    """A graph that is thrown away takes its files along."""
    disk = Disk(tmp_path)
    _, loss = stored(disk)
    assert len(files(tmp_path)) == 4
    del loss
    assert disk.statistics.held.bytes == 0
    assert files(tmp_path) == []


def test_a_limit_holds(tmp_path: Path) -> None:
    """What has no room is dropped instead."""
    disk = Disk(tmp_path, 2 * SIZE)
    x, loss = stored(disk)
    assert sum(file.stat().st_size for file in files(tmp_path)) == 2 * SIZE
    loss.backward()
    assert_right(x)


def test_a_folder_is_made(tmp_path: Path) -> None:
    """Also with those above it; all of ours goes with the store."""
    disk = Disk(tmp_path / "a" / "b")
    assert len(list((tmp_path / "a" / "b").iterdir())) == 2
    del disk
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_two_stores_in_one_folder(tmp_path: Path) -> None:
    """They do not see each other."""
    first, second = Disk(tmp_path), Disk(tmp_path)
    (x, loss), (y, other) = stored(first), stored(second)
    assert len(files(tmp_path)) == 8
    other.backward()
    assert len(files(tmp_path)) == 4
    loss.backward()
    assert_right(x)
    assert_right(y)


PROGRAM = """
import os, signal, sys
import torch, scrimp
disk = scrimp.store.Disk(sys.argv[1])
x = torch.ones(100, requires_grad=True)
with scrimp.session(scrimp.policy.StoreAll(disk)):
    loss = x.exp().tanh().sum()
print("ready", flush=True)
{end}
"""


def run(folder: Path, end: str) -> subprocess.Popen[str]:
    """Start a process that has two values in a folder, and wait until it has."""
    program = textwrap.dedent(PROGRAM).format(end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> int:
    """Let a process go on, and wait for its end."""
    process.communicate("\n", timeout=60)
    return process.returncode


@pytest.mark.parametrize(
    "end", ["sys.exit(3)", pytest.param("loss.backward(); del loss; sys.exit(3)", marks=pytest.mark.slow)]
)
def test_nothing_is_left_after_exit(tmp_path: Path, end: str) -> None:
    """A process that ends, with its graph alive or not, leaves the folder empty."""
    assert finish(run(tmp_path, end)) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_crash_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    """What a killed process left goes when the next store is made there; what a living one has stays."""
    living = run(tmp_path, "input(); loss.backward()")
    killed = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert finish(killed) == -signal.SIGKILL
    assert len(files(tmp_path)) == 4
    disk = Disk(tmp_path)
    assert len(files(tmp_path)) == 2
    assert finish(living) == 0
    assert files(tmp_path) == []
    del disk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fork_does_not_remove_it(tmp_path: Path) -> None:
    """A child that ends by itself leaves its parent's files alone, and cannot use them."""
    program = """
    import os, sys, warnings
    import torch, scrimp
    warnings.simplefilter("ignore")
    disk = scrimp.store.Disk(sys.argv[1])
    child = os.fork()
    if not child:
        try:
            with scrimp.session(scrimp.policy.StoreAll(disk)):
                torch.ones(3, requires_grad=True).exp()
        except scrimp.errors.StoreError:
            sys.exit(7)
        sys.exit(8)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(os.listdir(sys.argv[1])) == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_layers_are_recomputed_from_their_weights(tmp_path: Path) -> None:
    """When all files are gone, every value of a network is computed again, after its session was left."""
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(3)))
    batch = torch.randn(64, 32)
    with scrimp.session(StoreAll(Disk(tmp_path))):
        loss = net(batch).square().mean()
    for file in files(tmp_path):
        file.unlink()
    with pytest.warns(StoreWarning, match="recomputed"):
        loss.backward()
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    net(batch).square().mean().backward()
    for one, parameter in zip(found, net.parameters(), strict=True):
        assert one is not None
        assert parameter.grad is not None
        assert torch.equal(one, parameter.grad)


def test_weights_that_were_changed_recompute_nothing(tmp_path: Path) -> None:
    """A lost value whose layer was stepped in between is an error, not a wrong gradient."""
    layer = torch.nn.Linear(32, 32)
    with scrimp.session(StoreAll(Disk(tmp_path))):
        loss = layer(torch.randn(64, 32)).exp().sum()
    for file in files(tmp_path):
        file.unlink()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(StoreError, match="bytes"):
        loss.backward()


def test_writing_leaves_no_trace_on_a_storage(tmp_path: Path) -> None:
    """A storage whose bytes are being written can be resized as before: no array has its memory."""
    x = leaf()
    with scrimp.session(StoreAll(Disk(tmp_path, window=1))):
        value = x.exp()
        value.tanh().sum().backward()
    assert value.untyped_storage().resizable()
