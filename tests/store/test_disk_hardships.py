"""Disks in a hard world: limits of the system, folders that vanish, processes that die in the middle of a write."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp.errors import StoreError, StoreWarning
from scrimp.planning import Store, simulate
from scrimp.policy import Planned, StoreAll
from scrimp.store import Disk, Host, Tiers, _files
from scrimp.testing import live_bytes


def run(program: str, folder: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own; its first argument is a folder."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def files(folder: Path) -> list[Path]:
    """The files of values in all stores of a folder."""
    return sorted(folder.rglob("*.bytes"))


def step(x: Tensor) -> Tensor:
    """Four values are saved."""
    return x.exp().tanh().sigmoid().sqrt().sum()


def leaf() -> Tensor:
    """A parameter."""
    return torch.linspace(-1, 1, 64 * 64).reshape(64, 64).requires_grad_()


def plain_gradient() -> Tensor:
    """What the step gives without scrimp."""
    x = leaf()
    step(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.slow
def test_a_limit_of_the_system_on_file_sizes(tmp_path: Path) -> None:
    """Where the kernel refuses to write on, a warning names the file, and gradients are right."""
    program = """
    import resource, sys, warnings
    import torch, scrimp
    def step(x):
        return x.exp().tanh().sigmoid().sqrt().sum()
    x = torch.randn(64, 64, requires_grad=True)
    step(x).backward()
    plain, x.grad = x.grad, None
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    disk = scrimp.store.Disk(sys.argv[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with scrimp.session(policy=scrimp.policy.StoreAll(disk)):
            loss = step(x)
        loss.backward()
    assert torch.equal(x.grad, plain)
    print(*(one.message for one in caught))
    """
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"need to write 16384 bytes to .*\.bytes, cannot: File too large", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanishes_while_values_are_written(tmp_path: Path) -> None:
    """What was written is computed again, what comes later stays in memory; each warning names a file."""
    disk = Disk(tmp_path, window=1)
    x = leaf()

    def go() -> None:
        with scrimp.session(StoreAll(disk)):
            half = x.exp().tanh()
            for folder in tmp_path.iterdir():
                if folder.is_dir():
                    shutil.rmtree(folder)
            loss = half.sigmoid().sqrt().sum()
        loss.backward()

    with pytest.warns(StoreWarning, match=r"\.bytes"):
        go()
    assert x.grad is not None
    assert torch.equal(x.grad, plain_gradient())


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    """The error comes at once, and names the folder."""
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match=re.escape(str(tmp_path))):
            Disk(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_on_a_file_system_without_write_access() -> None:
    """Also where root may not write."""
    with pytest.raises(StoreError, match="/proc"):
        Disk("/proc/scrimp")


def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """A process that is killed while files are half written leaves nothing that the next store does not remove."""
    program = """
    import os, signal, sys, threading, time
    import torch, scrimp
    from scrimp.store import _files
    def slowly(descriptor, content):
        written = os.write(descriptor, content[:100])
        print("writing", flush=True)
        time.sleep(60)
        return written
    _files.write_some = slowly
    disk = scrimp.store.Disk(sys.argv[1])
    with scrimp.session(policy=scrimp.policy.StoreAll(disk)):
        loss = torch.randn(64, 64, requires_grad=True).exp().tanh().sum()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (partial,) = files(tmp_path)
    assert partial.stat().st_size == 100
    disk = Disk(tmp_path)
    assert not partial.exists()
    del disk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_many_processes_share_a_folder(tmp_path: Path) -> None:
    """Started together, some killed: the others' gradients are right, and in the end nothing is left."""
    program = """
    import os, signal, sys
    import torch, scrimp
    torch.manual_seed(os.getpid())
    x = torch.randn(64, 64, requires_grad=True)
    x.exp().tanh().sigmoid().sum().backward()
    plain = x.grad
    for _ in range(20):
        x.grad = None
        with scrimp.session(policy=scrimp.policy.StoreAll(scrimp.store.Disk(sys.argv[1]))):
            loss = x.exp().tanh().sigmoid().sum()
        if len(sys.argv) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        assert torch.equal(x.grad, plain)
    """
    commands = [[sys.executable, "-c", textwrap.dedent(program), str(tmp_path), *kill] for kill in ([], ["k"], [])]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=120) for process in processes] == [0, -signal.SIGKILL, 0]
    disk = Disk(tmp_path)
    del disk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interpreter_that_ends_while_it_writes(tmp_path: Path) -> None:
    """An exception that nobody catches, with writes on their way: the process ends, and leaves nothing."""
    program = """
    import os, sys, time
    import torch, scrimp
    from scrimp.store import _files
    write = _files.write_some
    _files.write_some = lambda *args: (time.sleep(0.05), write(*args))[1]
    disk = scrimp.store.Disk(sys.argv[1])
    with scrimp.session(policy=scrimp.policy.StoreAll(disk)):
        h = torch.randn(64, 64, requires_grad=True)
        for _ in range(20):
            h = h.exp().tanh()
        raise ValueError("early")
    """
    done = run(program, tmp_path)
    assert done.returncode == 1
    assert "ValueError: early" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_values_are_read_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk changes no bit, and no thread is left waiting when its store is gone."""
    write = _files.write_some

    def slowly(descriptor: int, content: memoryview) -> int:
        time.sleep(0.005)
        return write(descriptor, content)

    monkeypatch.setattr(_files, "write_some", slowly)
    disk = Disk(tmp_path)
    first, second = leaf(), leaf()
    with scrimp.session(StoreAll(disk)):
        one = step(first)
    with scrimp.session(StoreAll(disk)):
        other = step(second)
        one.backward()
    other.backward()
    for x in (first, second):
        assert x.grad is not None
        assert torch.equal(x.grad, plain_gradient())
    assert disk.statistics.held.count == 0
    del disk, one, other
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("scrimp") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["host", "disk", "tiers"])
def test_a_write_in_place_does_not_overtake_a_copy(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into a saved value's storage while its copy is on its way does not reach the copy."""
    write = _files.write_some

    def slowly(descriptor: int, content: memoryview) -> int:
        time.sleep(0.02)
        return write(descriptor, content)

    monkeypatch.setattr(_files, "write_some", slowly)
    store = {
        "host": Host,
        "disk": lambda: Disk(tmp_path),
        "tiers": lambda: Tiers(Host("20 kB"), Disk(tmp_path)),
    }[kind]()
    x = leaf()
    with scrimp.session(StoreAll(store)):
        value = x.exp()
        loss = value.tanh().sum()
        with torch.no_grad():
            value.detach().mul_(3)
    loss.backward()
    plain = leaf()
    plain.exp().tanh().sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("kind", ["strided", "broadcast", "transposed", "shared"])
def test_a_storage_moves_once_however_it_is_looked_at(kind: str, tmp_path: Path) -> None:
    """Strided views, broadcast tensors and shared storages: the bytes of the storage, once, and the plain gradients."""

    def program(x: Tensor) -> Tensor:
        h = x.exp()  # 16 KiB
        match kind:
            case "strided":
                return (h[::2, 1::3] * h[::2, ::3][:, : h[::2, 1::3].shape[1]]).sum()
            case "broadcast":
                row = h.mean(0)
                return (row.expand(64, 64) * row.expand(64, 64).square()).sum()
            case "transposed":
                return (h @ h.t()).sum()
        return (h.view(-1) * h.view(-1).square()).sum() + (h * h).sum()

    plain = leaf()
    program(plain).backward()
    disk = Disk(tmp_path)
    x = leaf()
    with scrimp.session(StoreAll(disk)):
        loss = program(x)
    storages = {"strided": 16384, "broadcast": 16384 + 256 + 16384, "transposed": 16384, "shared": 16384 + 16384}
    assert disk.statistics.bytes_out <= storages[kind]
    loss.backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_planned_step_takes_what_is_simulated(kind: str, tmp_path: Path) -> None:
    """Decisions to keep, drop and store, carried out on the CPU: measured live bytes are the simulated ones."""
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)]
    net, batch = torch.nn.Sequential(*layers), torch.randn(256, 64)

    def loss_of() -> Tensor:
        loss: Tensor = net(batch).square().mean()
        return loss

    seen = scrimp.trace(loss_of)
    linked = scrimp.planning.Trace(seen.values, seen.ops, seen.events, seen.resident, 1e13, 1e13)
    peak = simulate(linked).peak
    resident = sum(part.nbytes for part in seen.resident)
    made = scrimp.plan(linked, peak - 100_000, host="1GiB")
    assert any(isinstance(one, Store) for one in made.decisions.values())
    store = Host() if kind == "host" else Disk(tmp_path)
    net.zero_grad()
    with live_bytes() as count:
        with scrimp.session(Planned(linked, made, store)):
            loss = loss_of()
        loss.backward()
    assert resident + count.peak <= made.peak
