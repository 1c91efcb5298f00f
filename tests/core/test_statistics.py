"""The account of a session is right at every moment."""

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import SessionError
from scrimp.policy import EveryN, KeepNone, Online

KIB = 1024


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
