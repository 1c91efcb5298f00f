"""How host memory is cut up for what is stored in it."""

from __future__ import annotations

__all__ = ["pieces_for"]

_LARGEST = 64 << 20
_SMALLEST = 4 << 10


def pieces_for(nbytes: int) -> list[int]:
    """Split bytes into pieces that are powers of two, with little to spare.

    That is how the system hands out pinned memory without loss, and any value can use the pieces of another again.

    >>> pieces_for(100_000)
    [65536, 32768, 16384]
    """
    full, rest = divmod(nbytes, _LARGEST)
    found = [_LARGEST] * full
    unit = max(_SMALLEST, 1 << max(0, (rest - 1).bit_length() - 3))
    rest = -(-rest // unit) * unit
    while rest:
        piece = 1 << (rest.bit_length() - 1)
        found.append(piece)
        rest -= piece
    return found
