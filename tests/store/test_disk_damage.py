"""Files that are damaged, gone or cannot be written: values are computed again, or an error names the file."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp.errors import StoreError, StoreWarning
from scrimp.policy import StoreAll, StoreOps
from scrimp.store import Disk, _files

from .steps import assert_right, files, leaf, stored

aten = torch.ops.aten


class Cube(torch.autograd.Function):
    """A Function of the user's own: what it saves cannot be replayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x³."""
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """3x²."""
        return grads[0] * ctx.saved_tensors[0] * 3


def truncate(file: Path) -> None:
    """Cut a file short."""
    os.truncate(file, 100)


def alter(file: Path) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[77] ^= 1
    file.write_bytes(content)


DAMAGE = {"truncated": truncate, "altered": alter, "removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_recomputed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """What is lost is computed again, from other files as far as they are whole, with a warning that names the file."""
    x, loss = stored(Disk(tmp_path))
    damaged = files(tmp_path)[2]
    damage(damaged)
    with pytest.warns(StoreWarning, match=re.escape(str(damaged))):
        loss.backward()
    assert_right(x)


def test_all_files_damaged(tmp_path: Path) -> None:
    """Everything is computed again from the leaf."""
    x, loss = stored(Disk(tmp_path))
    for file in files(tmp_path):
        alter(file)
    with pytest.warns(StoreWarning, match="altered"):
        loss.backward()
    assert_right(x)


def test_a_damaged_source_of_a_replay(tmp_path: Path) -> None:
    """A replay that was to start from a damaged file starts further up."""

    def step(x: Tensor) -> Tensor:
        return x.exp().tanh().sigmoid().sum()

    x = leaf()
    with scrimp.session(StoreOps({aten.exp}, Disk(tmp_path))):
        loss = step(x)
    truncate(files(tmp_path)[0])
    with pytest.warns(StoreWarning, match="recomputed"):
        loss.backward()
    assert_right(x, step)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_to_what_cannot_be_recomputed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Where nobody knows how to compute a value, the error names the file."""
    with scrimp.session(StoreAll(Disk(tmp_path))):
        loss = Cube.apply(leaf()).sum()
    (file,) = files(tmp_path)
    damage(file)
    with pytest.raises(StoreError, match=re.escape(str(file))):
        loss.backward()


def test_recomputing_needs_what_it_starts_from(tmp_path: Path) -> None:
    """A damaged value whose inputs are gone is an error, not a wrong gradient."""
    w, data = leaf(), torch.ones(64, 64)
    with scrimp.session(StoreAll(Disk(tmp_path))):
        loss = (w + data).exp().sum()
    del data
    truncate(files(tmp_path)[0])
    with pytest.raises(StoreError, match="have 100"):
        loss.backward()


def fail_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full after so many writes."""
    left = iter(range(count))

    def write_some(descriptor: int, content: memoryview) -> int:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, content)

    monkeypatch.setattr(_files, "write_some", write_some)


@pytest.mark.parametrize("window", [1, "1MiB"], ids=["one at a time", "all at once"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | str) -> None:
    """A warning names the file, nothing is lost, and no piece of a file is left."""
    fail_after(2, monkeypatch)
    with pytest.warns(StoreWarning, match=r"\.bytes, cannot: No space left"):
        x, loss = stored(Disk(tmp_path, window=window))
    assert len(files(tmp_path)) == 2
    loss.backward()
    assert_right(x)


def test_a_disk_that_was_full_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once values are gone, there may be room."""
    fail_after(0, monkeypatch)
    disk = Disk(tmp_path)
    with pytest.warns(StoreWarning, match="No space left"):
        _, loss = stored(disk)
    loss.backward()
    del loss
    monkeypatch.undo()
    x, loss = stored(disk)
    assert len(files(tmp_path)) == 4
    loss.backward()
    assert_right(x)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    """The error comes when the store is made, and names the folder."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        Disk(tmp_path / "file" / "below")
