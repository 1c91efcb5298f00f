"""Budgets for device, host and disk together: scrimp.limit and scrimp.session with stores."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import BudgetError, PolicyError, SessionError, StoreWarning
from scrimp.planning import Keep, Store
from scrimp.store import Disk, Host, Tiers
from scrimp.store._measure import Bandwidths, measured
from scrimp.testing import live_bytes

WIDTH, DEPTH, ROWS = 64, 5, 256
PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files of a test go to a folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def _detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every limited model of the process counts towards a budget; a test leaves none behind."""
    limit, sessions = scrimp.limit, []

    def noted(*args: Any, **kwargs: Any) -> scrimp.BudgetSession:
        sessions.append(limit(*args, **kwargs))
        return sessions[-1]

    gc.collect()
    monkeypatch.setattr(scrimp, "limit", noted)
    yield
    for session in sessions:
        session.detach()


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are taken to be so fast that nothing is worth computing again."""
    monkeypatch.setattr("scrimp._elsewhere.measured", lambda *_: Bandwidths(1e13, 1e13))


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are taken to be so slow that whatever can be is computed again."""
    monkeypatch.setattr("scrimp._elsewhere.measured", lambda *_: Bandwidths(1.0, 1.0))


def model() -> nn.Module:
    """Layers with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(DEPTH)))


def batches(steps: int) -> Iterator[Tensor]:
    """The same in every run."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(steps))


def trained(net: nn.Module, steps: int = 2) -> tuple[list[int], list[Tensor]]:
    """Live bytes of each step's peak, parameters and batch included, and all that training leaves behind."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    peaks, left = [], []
    torch.manual_seed(2)
    for batch in batches(steps):
        with live_bytes() as count:
            loss = net(batch).square().mean()
            loss.backward()
        peaks.append(PARAMETERS + batch.nbytes + count.peak)
        left.append(loss.detach())
        left.extend(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    return peaks, [*left, *(parameter.detach() for parameter in net.parameters()), torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all are equal to the bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def kinds(session: scrimp.BudgetSession) -> set[type]:
    """The kinds of decisions in the plan."""
    assert session.plan is not None
    return {type(decision) for decision in session.plan.decisions.values()}


@pytest.fixture
def plain() -> tuple[list[int], list[Tensor]]:
    """What training without scrimp needs and leaves."""
    return trained(model())


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    "stores",
    [{"disk": "1GiB"}, {"host": "1GiB"}, {"host": "150 kB", "disk": "1GiB"}, {"host": 70_000}],
    ids=["disk", "host", "both", "small"],
)
def test_the_device_stays_within_its_budget(
    stores: dict[str, int | str], plain: tuple[list[int], list[Tensor]]
) -> None:
    """From the first step on, with gradients, parameters and random draws of the plain steps, to the bit."""
    budget = int(max(plain[0]) * 0.7)
    net = model()
    session = scrimp.limit(net, budget, **stores)  # type: ignore[arg-type]
    peaks, left = trained(net)
    assert max(peaks) <= budget
    assert same(left, plain[1])
    assert Store in kinds(session)
    assert session.stored is not None
    assert session.stored.held.count == 0


@pytest.mark.usefixtures("_fast")
def test_the_first_step_sends_away_what_has_no_room(plain: tuple[list[int], list[Tensor]]) -> None:
    """Before there is a plan, values go to the disk as memory fills up in forward, and come back once each."""
    net = model()
    session = scrimp.limit(net, int(max(plain[0]) * 0.7), disk="1GiB")
    trained(net, steps=1)
    assert session.stored is not None
    assert session.stored.held.total > 0
    assert session.stored.bytes_in == session.stored.bytes_out


@pytest.mark.usefixtures("_slow")
def test_what_is_cheap_is_computed_again(plain: tuple[list[int], list[Tensor]]) -> None:
    """A store that is slower than the operators stays empty, in the first step and in planned ones."""
    net = model()
    session = scrimp.limit(net, int(max(plain[0]) * 0.7), disk="1GiB")
    _, left = trained(net)
    assert session.stored is not None
    assert session.stored.held.total == 0
    assert session.statistics.replayed_operators > 0
    assert same(left, plain[1])


@pytest.mark.usefixtures("_fast")
def test_without_pressure_nothing_moves(plain: tuple[list[int], list[Tensor]]) -> None:
    """A budget that the plain step meets uses no store."""
    net = model()
    session = scrimp.limit(net, max(plain[0]) * 2, host="1GiB", disk="1GiB")
    trained(net)
    assert kinds(session) == {Keep}
    assert session.stored is not None
    assert session.stored.held.total == 0


@pytest.mark.usefixtures("_fast")
def test_the_host_keeps_to_its_limit(plain: tuple[list[int], list[Tensor]]) -> None:
    """A host with room for one value gets no more; the rest is computed again."""
    net = model()
    host = Host("70 kB")
    session = scrimp.limit(net, int(max(plain[0]) * 0.7), host=host)
    trained(net)
    assert 0 < host.statistics.held.peak_bytes <= 70_000
    assert session.statistics.replayed_operators > 0


@pytest.mark.usefixtures("_fast")
def test_a_session_has_tiers(plain: tuple[list[int], list[Tensor]]) -> None:
    """Code that is no module is held under budgets of device, host and disk the same way."""
    net = model()
    session = scrimp.session(int(max(plain[0]) * 0.7), host="150 kB", disk="1GiB", device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    torch.manual_seed(2)
    losses = []
    for batch in batches(2):
        with session:
            loss = net(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert same(
        [*losses, *(one.detach() for one in net.parameters())],
        [*plain[1][:: 2 * DEPTH + 1][:2], *plain[1][-2 * DEPTH - 1 : -1]],
    )
    assert session.stored is not None
    assert session.stored.held.total > 0


@pytest.mark.usefixtures("_fast")
def test_a_report_says_what_is_stored(plain: tuple[list[int], list[Tensor]]) -> None:
    """A session with stores can be reported on; its plan can be simulated on its trace."""
    net = model()
    session = scrimp.limit(net, int(max(plain[0]) * 0.7), disk="1GiB")
    trained(net)
    assert session.trace is not None
    assert session.plan is not None
    assert scrimp.planning.simulate(session.trace, session.plan).peak == session.plan.peak
    assert str(session.report())


@pytest.mark.usefixtures("_fast")
def test_a_file_that_is_lost_is_computed_again(plain: tuple[list[int], list[Tensor]], tmp_path: Path) -> None:
    """In a planned step, too, a truncated file costs a warning and a replay, and no bit of a gradient."""
    net = model()
    scrimp.limit(net, int(max(plain[0]) * 0.7), disk=Disk(tmp_path))
    trained(net)
    fresh = model()
    net.load_state_dict(fresh.state_dict())
    batch = next(batches(1))
    torch.manual_seed(3)
    loss = net(batch).square().mean()
    files = list(tmp_path.rglob("*.bytes"))
    assert files
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    with pytest.warns(StoreWarning, match="recomputed instead"):
        loss.backward()
    torch.manual_seed(3)
    fresh(batch).square().mean().backward()
    assert same(*([one.grad for one in each.parameters() if one.grad is not None] for each in (net, fresh)))


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("steps_before", [0, 1], ids=["first", "planned"])
def test_a_step_that_fails_leaves_nothing_in_the_stores(
    steps_before: int, plain: tuple[list[int], list[Tensor]]
) -> None:
    """An exception in forward, or a loss that nobody goes back from, empties them; later steps are right."""
    net = model()
    session = scrimp.limit(net, int(max(plain[0]) * 0.7), disk="1GiB")
    trained(net, steps_before)
    broken = net[DEPTH - 1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(next(batches(1)))
    broken.remove()
    net(next(batches(1)))  # and nobody goes back
    gc.collect()
    net.load_state_dict(model().state_dict())
    assert same(trained(net)[1], plain[1])
    assert session.stored is not None
    assert session.stored.held.count == 0


def test_numbers_of_bytes_make_stores() -> None:
    """What is stated as bytes becomes a host, a disk in the folder for temporary files, or tiers."""
    tiers = scrimp.session("1GiB", host="1MiB", disk=Disk(tempfile.gettempdir(), "2MiB"))._elsewhere.store
    assert isinstance(tiers, Tiers)
    assert (tiers.near.limit, tiers.far.limit) == (1 << 20, 2 << 20)


@pytest.mark.parametrize(
    ("stores", "error"),
    [
        ({"host": Disk}, SessionError),
        ({"disk": Host}, SessionError),
        ({"host": 0.5}, BudgetError),
        ({"host": "much"}, BudgetError),
        ({"host": Host, "disk": "1MiB"}, SessionError),
    ],
    ids=["disk-as-host", "host-as-disk", "fraction", "words", "tiers-without-limit"],
)
def test_what_is_no_store_is_refused(stores: dict[str, object], error: type[Exception], tmp_path: Path) -> None:
    """A store of the wrong kind, a fraction, or tiers whose first has no limit: the error says what to give."""
    made = {name: one(tmp_path) if one is Disk else one() if one is Host else one for name, one in stores.items()}
    with pytest.raises(error, match=r"host=|disk=|budget"):
        scrimp.limit(model(), "1GiB", **made)  # type: ignore[arg-type]


def test_stores_go_with_a_budget() -> None:
    """A policy names its own store."""
    with pytest.raises(PolicyError, match="StoreAll"):
        scrimp.session(scrimp.policy.KeepNone(), host="1GiB")  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_store_is_measured_and_left_empty(kind: str, tmp_path: Path) -> None:
    """Measuring gives bytes per second each way."""
    store = Host() if kind == "host" else Disk(tmp_path)
    speed = measured(store, torch.device("cpu"))
    assert speed.out > 0
    assert speed.back > 0
    assert store.statistics.held.count == 0


def test_a_full_store_has_no_speed() -> None:
    """Where there is no room to measure, there is none to store."""
    host = Host("1MiB")
    held = host.put(torch.zeros(1 << 20, dtype=torch.uint8))
    assert held is not None
    assert measured(host, torch.device("cpu")) == Bandwidths(0.0, 0.0)
