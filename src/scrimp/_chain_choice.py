"""Which kept inputs of a chain go when there is no room. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from scrimp._chain_layer import Layer, Record, comes_back, is_here


def described(record: Record, gone: Container[Record] = ()) -> Layer:
    """Return what a policy is told of a layer's input, were those ``gone`` that are to go."""
    seconds, before = 0.0, record.before
    while before is not None:
        seconds += before.seconds
        before = None if is_here(before, gone) else before.before
    return Layer(record.layer_id, record.index, record.nbytes, seconds)


def chosen(
    kept: Iterable[Record], coming: Record | None, over: int, worth: Callable[[Layer], float], has_store: bool
) -> dict[Record, None]:
    """Choose inputs to let go of, the least worthy first, until ``over`` bytes are free; perhaps the ``coming`` one.

    None goes in vain: where a larger one that goes later makes room enough, those before it stay. Without a store, only
    what can be computed again may go; fewer bytes may be free then.
    """
    gone: dict[Record, None] = {}
    left = dict.fromkeys(kept)
    if coming is not None and (has_store or coming.before is not None):
        left[coming] = None
    while over > 0:
        able = [one for one in left if has_store or one is coming or comes_back(one, gone)]
        if not able:
            break
        worths = {one: worth(described(one, gone)) for one in able}
        least = min(able, key=lambda one: worths[one])
        gone[least] = None
        del left[least]
        over -= least.nbytes
    for one in reversed(list(gone)):
        if over + one.nbytes <= 0:
            over += one.nbytes
            del gone[one]
    return gone
