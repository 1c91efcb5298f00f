"""What all tests share."""

import weakref

import pytest

from scrimp import _limit


@pytest.fixture(autouse=True)
def no_limited_models_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU every limited module of the process counts: those that other tests have left must not."""
    monkeypatch.setattr(_limit, "_limited", weakref.WeakSet())
