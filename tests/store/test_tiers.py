"""Device, host, disk: each under its limit, and the last to leave is the nearest."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp.errors import StoreWarning
from scrimp.policy import Online, StoreAll
from scrimp.store import Disk, Host, Store, Tiers
from scrimp.testing import Step, assert_same_step

SIZE = 64 * 64 * 4


def leaf() -> Tensor:
    """A leaf of ``SIZE`` bytes."""
    return torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()


def chain(x: Tensor) -> Tensor:
    """Operators that save eight values of the size of ``x``."""
    for _ in range(4):
        x = (x.exp() * 0.1).tanh()
    return x.exp().sum()


def assert_right(x: Tensor) -> None:
    """Fail unless a leaf has the gradient that it has without scrimp."""
    other = leaf()
    chain(other).backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_the_comparison_can_fail() -> None:
    """A leaf with another gradient is told apart."""
    x = leaf()
    x.sum().backward()
    with pytest.raises(AssertionError):
        assert_right(x)


def test_what_was_stored_last_is_near(tmp_path: Path) -> None:
    """The oldest values are on disk, the youngest in host memory, and no limit is passed."""
    tiers = Tiers(Host(4 * SIZE), Disk(tmp_path))
    x = leaf()
    with scrimp.session(StoreAll(tiers)) as session:
        loss = chain(x)
    count = session.statistics.stored.count
    assert session.statistics.kept.bytes == 0
    near, far = tiers.near.statistics.held, tiers.far.statistics.held
    assert near.count + far.count == tiers.statistics.held.count == count
    assert near.peak_bytes <= 4 * SIZE
    assert far.count >= count - 4
    loss.backward()
    assert_right(x)
    for store in (tiers, tiers.near, tiers.far):
        assert store.statistics.held.bytes == 0
    assert tiers.near.statistics.bytes_in > 0


@pytest.mark.parametrize("host", [1, 3 * SIZE, 100 * SIZE], ids=["none", "some", "all"])
def test_steps_are_exact(tmp_path: Path, host: int) -> None:
    """Whatever part fits in host memory, again and again."""
    tiers = Tiers(Host(host), Disk(tmp_path, 100 * SIZE))

    def make_step() -> Step:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout())
        x = torch.randn(64, 64, requires_grad=True)
        return Step(lambda: model(model(x)).square().mean(), state=(model, x))

    for inside in (False, True):
        assert_same_step(make_step, lambda: scrimp.session(StoreAll(tiers)), backward_inside=inside)
    assert tiers.statistics.held.bytes == 0


def test_backward_again(tmp_path: Path) -> None:
    """Values come back from both tiers in each pass."""
    tiers = Tiers(Host(4 * SIZE), Disk(tmp_path))
    x = leaf()
    with scrimp.session(StoreAll(tiers)):
        loss = chain(x)
    for _ in range(2):
        x.grad = None
        loss.backward(retain_graph=True)
        assert_right(x)
    del loss
    assert tiers.far.statistics.held.bytes == 0


def test_both_full(tmp_path: Path) -> None:
    """What fits nowhere is recomputed."""
    tiers = Tiers(Host(2 * SIZE), Disk(tmp_path, 2 * SIZE))
    x = leaf()
    with scrimp.session(StoreAll(tiers)) as session:
        loss = chain(x)
    assert session.statistics.kept.bytes == 0
    assert session.statistics.dropped.count > 0
    assert tiers.far.statistics.held.peak_bytes <= 2 * SIZE
    loss.backward()
    assert_right(x)


def test_damage_is_recomputed(tmp_path: Path) -> None:
    """A file that is lost is computed again, from host memory if that is where its inputs are."""
    tiers = Tiers(Host(4 * SIZE), Disk(tmp_path, window=1))
    x = leaf()
    with scrimp.session(StoreAll(tiers)):
        loss = chain(x)
    for file in tmp_path.glob("scrimp-*/*.bytes"):
        file.unlink()
    with pytest.warns(StoreWarning, match="recomputed"):
        loss.backward()
    assert_right(x)


@pytest.mark.parametrize("evict", ["oldest", "cheapest"])
def test_device_then_host_then_disk_then_recomputing(tmp_path: Path, evict: str) -> None:
    """A budget for the device and a limit for each tier, all kept."""
    tiers = Tiers(Host(2 * SIZE), Disk(tmp_path, 2 * SIZE))
    x = leaf()
    with scrimp.session(Online(2 * SIZE, evict=evict, store=tiers)) as session:
        loss = chain(x)
    seen = session.statistics
    assert seen.kept.bytes == 2 * SIZE
    assert seen.kept.peak_bytes <= 3 * SIZE
    assert seen.stored.bytes >= 3 * SIZE
    assert seen.dropped.bytes > 0
    loss.backward()
    assert_right(x)
    assert tiers.statistics.held.bytes == 0


@pytest.mark.parametrize("limit", [None, 2 * SIZE], ids=["enough", "little"])
def test_eviction_to_one_store(limit: int | None) -> None:
    """Values beyond the budget go to the store as long as it has room; none is dropped before that."""
    host: Store = Host(limit)
    x = leaf()
    with scrimp.session(Online(2 * SIZE, evict="oldest", store=host)) as session:
        loss = chain(x)
    seen = session.statistics
    assert seen.kept.bytes == 2 * SIZE
    assert (seen.dropped.count == 0) == (limit is None)
    loss.backward()
    assert_right(x)
    assert host.statistics.held.bytes == 0
    assert session.statistics.kept.bytes == 0
