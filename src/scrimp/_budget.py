"""Sizes in bytes: read what people write, write what people read."""

from __future__ import annotations

import re

from .errors import BudgetError

__all__ = ["Budget", "format_bytes", "parse_budget"]

Budget = int | float | str

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("kB", "MB", "GB", "TB")
_FACTORS = {
    "b": 1,
    **{unit.lower(): 1024 ** (power + 1) for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000 ** (power + 1) for power, unit in enumerate(_DECIMAL)},
}
_SIZE = re.compile(r"\s*(\d+(?:[._]\d+)*)\s*([a-z]+)\s*", re.IGNORECASE)
_ACCEPTED = 'a size such as "8GiB" or "8 GB", bytes as an int, or a fraction of the device such as 0.9'


def parse_budget(budget: Budget, capacity: int | None = None) -> int:
    """Bytes of a budget as people write it.

    Args:
        budget: ``"8GiB"`` (1024s), ``"8 GB"`` (1000s), a number of bytes, or a float in (0, 1]: that fraction
            of ``capacity``.
        capacity: bytes of the device that a fraction refers to.

    Raises:
        BudgetError: when ``budget`` is none of these, or is not positive.

    Example:
        >>> parse_budget("8GiB")
        8589934592
        >>> parse_budget("1.5 GB"), parse_budget(2_000_000), parse_budget(0.5, capacity=1000)
        (1500000000, 2000000, 500)
    """
    match budget:
        case bool():
            raise _unreadable(budget)
        case int():
            size = budget
        case float():
            size = _fraction(budget, capacity)
        case str():
            size = _size(budget)
        case _:
            raise _unreadable(budget)
    if size <= 0:
        raise BudgetError(f"A budget is at least one byte; got {budget!r}. Give {_ACCEPTED}.")
    return size


def _fraction(fraction: float, capacity: int | None) -> int:
    if not 0 < fraction <= 1:
        raise BudgetError(
            f"A float budget is a fraction of the device, above 0 and at most 1; got {fraction!r}. Give {_ACCEPTED}."
        )
    if capacity is None:
        raise BudgetError(
            f"The budget {fraction!r} is a fraction of a device, but there is none to measure here. "
            'Give a size such as "8GiB", or bytes as an int.'
        )
    return int(fraction * capacity)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise _unreadable(text)
    try:
        return int(float(match[1]) * _FACTORS[match[2].lower()])
    except ValueError:
        raise _unreadable(text) from None


def _unreadable(budget: object) -> BudgetError:
    units = ", ".join(("B", *_DECIMAL, *_BINARY))
    return BudgetError(f"Cannot read {budget!r} as a budget. Give {_ACCEPTED}. Units: {units}.")


def format_bytes(nbytes: int) -> str:
    """Bytes in the binary unit that people read most easily.

    Example:
        >>> format_bytes(8589934592), format_bytes(1536), format_bytes(12)
        ('8.00 GiB', '1.50 KiB', '12 B')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in _BINARY:
        size /= 1024
        if abs(size) < 1023.995 or unit == _BINARY[-1]:
            return f"{size:.2f} {unit}"
    raise AssertionError("unreachable: the last unit takes every size")
