"""Reading and writing sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp._budget import Budget, format_bytes, parse_budget
from scrimp.errors import BudgetError


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8 GB", 8 * 10**9),
        (" 1.5 kib ", 1536),
        ("300 MB", 300 * 10**6),
        ("7 B", 7),
        (123, 123),
    ],
)
def test_reads_sizes(written: Budget, nbytes: int) -> None:
    """Binary and decimal units, with and without a space, in any case; ints are bytes."""
    assert parse_budget(written) == nbytes


def test_fraction_is_of_the_capacity() -> None:
    """A float is a fraction of the capacity, rounded down."""
    assert parse_budget(0.9, capacity=1001) == 900


@pytest.mark.parametrize("wrong", ["8", "GiB", "8 GiBB", "-1 GiB", "1.2.3 GiB", "", None, True, 0, -5, 0.0, 1.5, [1]])
def test_error_says_what_is_accepted(wrong: Budget) -> None:
    """What cannot be read is refused, with examples of what can."""
    with pytest.raises(BudgetError, match="8GiB"):
        parse_budget(wrong, capacity=100)


def test_fraction_needs_a_capacity() -> None:
    """A fraction of nothing is refused."""
    with pytest.raises(BudgetError, match="none to measure"):
        parse_budget(0.5)


@given(st.integers(min_value=1, max_value=1 << 60))
def test_formatted_sizes_read_back(nbytes: int) -> None:
    """What is written for people is within the two decimals shown."""
    assert parse_budget(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)
