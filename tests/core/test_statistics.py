"""The account of a session is right at every moment."""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp._value import Value
from scrimp.errors import SessionError
from scrimp.policy import EveryN, KeepNone, Online, Policy, StoreAll, StoreInputs, StoreLargerThan
from scrimp.store import Host, Store
from scrimp.testing import live_bytes

KIB = 1024

POLICIES: dict[str, Callable[[Store], Policy]] = {
    "KeepNone": lambda store: KeepNone(),
    "EveryN": lambda store: EveryN(2),
    "Online": lambda store: Online(3 * KIB // 2),
    "Online, oldest": lambda store: Online(KIB // 2, evict="oldest"),
    "Online with a store": lambda store: Online(KIB // 2, store=store),
    "StoreAll": StoreAll,
    "StoreInputs": StoreInputs,
    "StoreLargerThan": lambda store: StoreLargerThan(100, store),
}


def test_step_by_step() -> None:
    """Made, kept, dropped and evicted, through forward, eviction and backward."""
    x = torch.linspace(0, 1, 256, requires_grad=True)
    with scrimp.session(Online(2 * KIB)) as session:
        first = x.exp()
        assert session.statistics.made.bytes == session.statistics.kept.bytes == KIB
        assert session.statistics.budget == 2 * KIB
        assert session.statistics.budget_used == 0.5
        second = (first * 2).exp()
        third = (second * 2).exp()
        now = session.statistics
        assert (now.made.count, now.kept.count, now.dropped.count, now.evicted.count) == (3, 2, 1, 1)
        assert (now.made.bytes, now.kept.bytes, now.dropped.bytes, now.evicted.bytes) == (3 * KIB, 2 * KIB, KIB, KIB)
        assert now.budget_used == 1.0
        assert now.replayed_operators == 0
    third.sum().backward()
    end = session.statistics
    assert (end.made.count, end.kept.count, end.dropped.count, end.evicted.count) == (0, 0, 0, 0)
    assert (end.made.bytes, end.kept.bytes, end.dropped.bytes, end.evicted.bytes) == (0, 0, 0, 0)
    assert (end.made.total, end.made.peak_bytes) == (3, 3 * KIB)
    assert end.replayed_operators >= 1
    assert end.replayed_seconds > 0


def test_parameters_and_inputs_count_nothing() -> None:
    """What was there before the session is not the session's."""
    layer = nn.Linear(16, 16)
    x = torch.randn(4, 16)
    with scrimp.session(EveryN(1)) as session:
        y = layer(x)
    assert session.statistics.made.count == 0
    y.sum().backward()


def test_views_count_once() -> None:
    """Bytes are those of storages."""
    x = torch.randn(16, 16, requires_grad=True)
    with scrimp.session(EveryN(1)) as session:
        y = x.exp()
        z = (y.t() @ y[:4].t()) * y.view(-1)[0]
    assert session.statistics.kept.bytes == y.numel() * 4 + (z.numel() * 4)
    z.sum().backward()
    assert session.statistics.kept.bytes == 0


def test_statistics_are_frozen() -> None:
    """A snapshot does not change, and cannot be changed."""
    statistics = scrimp.session(KeepNone()).statistics
    with pytest.raises(AttributeError):
        statistics.budget = 3  # type: ignore[misc]


def test_bytes_come_back_part_by_part() -> None:
    """As backward goes on, values are let go one after the other."""
    x = torch.randn(256, requires_grad=True)
    seen: list[int] = []
    with scrimp.session(EveryN(1)) as session:
        y: Tensor = x
        for _ in range(4):
            y = y.exp()
            y.register_hook(lambda _: seen.append(session.statistics.kept.count))
    y.sum().backward()
    assert seen == [4, 3, 2, 1]
    assert session.statistics.kept.count == 0


def test_one_session_object_adds_up() -> None:
    """Entered again and again, it goes on counting."""
    x = torch.randn(256, requires_grad=True)
    session = scrimp.session(KeepNone())
    for count in range(1, 4):
        with session:
            y = x.exp()
        assert session.statistics.made.total == count
        y.sum().backward()


def test_a_session_is_open_once_at_a_time() -> None:
    """Entering it inside itself, or leaving it when it is not open, is an error."""
    session = scrimp.session(KeepNone())
    with session, pytest.raises(SessionError, match="make another one"):
        session.__enter__()
    with pytest.raises(SessionError, match="not open"):
        session.__exit__(None, None, None)


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Collection[Value]:
    """All values that are made from now on and still live."""
    living: weakref.WeakSet[Value] = weakref.WeakSet()
    make = Value.__init__

    def make_and_note(value: Value, *args: Any) -> None:
        make(value, *args)
        living.add(value)

    monkeypatch.setattr(Value, "__init__", make_and_note)
    return living


def recounted(session: scrimp.Session, values: Collection[Value]) -> tuple[int, int, int, int]:
    """Bytes that are needed, kept, dropped and stored, found by asking every value that there is."""
    made = kept = dropped = stored = 0
    for value in list(values):
        if value.scope.ledger is not session._control.ledger:
            continue
        if value.is_away:
            stored += value.nbytes
        if not value.external:
            made += value.nbytes if value.handles else 0
            kept += value.nbytes if value.tensor is not None else 0
            dropped += value.nbytes if value.handles and value.tensor is None and value.copy is None else 0
    return made, kept, dropped, stored


def stated(session: scrimp.Session) -> tuple[int, int, int, int]:
    """The same as the session says."""
    now = session.statistics
    return now.made.bytes, now.kept.bytes, now.dropped.bytes, now.stored.bytes


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
def test_right_at_every_moment(
    make: Callable[[Store], Policy], inside: bool, retain_graph: bool, values: Collection[Value]
) -> None:
    """After each operator and in each step of backward, the account is what counting all values gives."""
    host = Host()
    session = scrimp.session(make(host))
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    moments: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def look(*_: object) -> None:
        moments.append((stated(session), recounted(session, values)))

    y = x * 1
    with session:
        for layer in range(4):
            y = y.sin() * y.exp()
            look()
            y.register_hook(look)
            if layer == 2:
                z = scrimp.checkpoint(lambda a: (a.tanh() * a).cos(), y)
                y = torch.nn.functional.dropout(z, 0.5).mul_(2)
                look()
        if inside:
            torch.autograd.grad(y.sum(), x, retain_graph=retain_graph)
            look()
    if not inside or retain_graph:
        torch.autograd.grad(y.sum(), x)
    del y, z
    look()
    assert len(moments) > 9
    assert [stated for stated, _ in moments] == [counted for _, counted in moments]
    assert moments[-1][0] == (0, 0, 0, 0)
    assert host.statistics.held.bytes == 0


def test_stored_bytes_are_those_that_the_store_holds() -> None:
    """They go out as forward goes on, and are back, and gone, after backward."""
    host = Host()
    x = torch.randn(256, requires_grad=True)
    with scrimp.session(StoreAll(host)) as session:
        y = x.exp()
        z = (y * 2).exp()
        loss = z.sum()
        del y, z
    now = session.statistics
    assert (now.stored.count, now.stored.bytes) == (2, 2 * KIB)
    assert (now.kept.bytes, now.dropped.bytes) == (0, 0)
    assert host.statistics.held.bytes == now.stored.bytes
    loss.backward()
    end = session.statistics
    assert (end.stored.count, end.stored.bytes, host.statistics.held.bytes) == (0, 0, 0)
    assert (end.stored.total, end.stored.peak_bytes) == (2, 2 * KIB)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
def test_kept_bytes_are_those_that_are_alive(make: Callable[[Store], Policy]) -> None:
    """When only the graph is left of a forward pass, the storages that live are the ones that are kept."""
    x = torch.linspace(-1, 1, 256, requires_grad=True)
    with live_bytes() as alive:
        with scrimp.session(make(Host())) as session:
            y = x
            for _ in range(4):
                y = (y.sin() * 2).exp().tanh()
            node = y.grad_fn
            del y
        assert alive.now == session.statistics.kept.bytes
        del node
        assert alive.now == 0
