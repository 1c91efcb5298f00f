"""Comparing tensors by their bits, whatever their layout."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def assert_same_tensor(name: str, expected: Tensor | None, actual: Tensor | None) -> None:
    """Raise unless two tensors are the same in type, layout and every bit; two `None`s are the same too.

    Bits are compared as integers: NaN equals an equal NaN, and `-0.0` differs from `0.0`.

    Args:
        name: what the tensor is, for the message.
        expected: the tensor of the plain run.
        actual: the tensor of the run that is judged.

    Raises:
        AssertionError: naming the tensor, how many elements differ, by how much, and the first of them.

    Example:
        >>> x = torch.tensor([1.0, float("nan")])
        >>> assert_same_tensor("x", x, x.clone())
        >>> assert_same_tensor("x", x, torch.tensor([1.5, float("nan")]))
        Traceback (most recent call last):
        ...
        AssertionError: x differs in 1 of 2 elements, by 0.5 at most; first at (0,): expected 1.0, got 1.5
    """
    if expected is None or actual is None:
        if expected is not actual:
            raise AssertionError(f"{name} differs: expected {_kind(expected)}, got {_kind(actual)}")
        return
    for what, want, have in (
        ("type", type(expected), type(actual)),
        ("layout", expected.layout, actual.layout),
        ("dtype", expected.dtype, actual.dtype),
        ("device", expected.device, actual.device),
        ("shape", _shape(expected), _shape(actual)),
        ("requires_grad", expected.requires_grad, actual.requires_grad),
    ):
        if want != have:
            raise AssertionError(f"{name} differs in {what}: expected {want}, got {have}")
    expected_parts, actual_parts = dense_parts(expected), dense_parts(actual)
    if expected_parts.keys() != actual_parts.keys():
        raise AssertionError(f"{name} differs in parts: expected {[*expected_parts]}, got {[*actual_parts]}")
    if expected_parts.keys() == {""}:
        _assert_same_bits(name, expected_parts[""], actual_parts[""])
        return
    for part in expected_parts:
        assert_same_tensor(f"{name}.{part}", expected_parts[part], actual_parts[part])


def dense_parts(tensor: Tensor) -> dict[str, Tensor]:
    """The strided tensors that hold a tensor's data; a plain strided tensor is its own part, named ''."""
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass; jagged nested tensors are one
        names, _context = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}
    if tensor.is_nested:
        return {f"component {i}": part for i, part in enumerate(tensor.unbind())}
    match tensor.layout:
        case torch.sparse_coo:
            return {"indices": tensor._indices(), "values": tensor._values()}
        case torch.sparse_csr | torch.sparse_bsr:
            return {
                "crow_indices": tensor.crow_indices(),
                "col_indices": tensor.col_indices(),
                "values": tensor.values(),
            }
        case torch.sparse_csc | torch.sparse_bsc:
            return {
                "ccol_indices": tensor.ccol_indices(),
                "row_indices": tensor.row_indices(),
                "values": tensor.values(),
            }
        case torch._mkldnn:  # type: ignore[attr-defined]
            return {"dense": tensor.to_dense()}
    return {"": tensor}


def _shape(tensor: Tensor) -> tuple[int, ...] | None:
    # A nested tensor's shape is symbolic or undefined; its parts tell.
    return None if tensor.is_nested else tuple(tensor.shape)


def _assert_same_bits(name: str, expected: Tensor, actual: Tensor) -> None:
    expected_bytes, actual_bytes = _bytes_of(expected), _bytes_of(actual)
    if torch.equal(expected_bytes, actual_bytes):
        return
    different = expected_bytes.ne(actual_bytes).any(dim=1)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    want, have = expected.reshape(-1)[different], actual.reshape(-1)[different]
    largest = torch.nan_to_num((want.to(wide) - have.to(wide)).abs(), nan=float("inf")).max()
    first = tuple(int(i) for i in torch.unravel_index(different.nonzero()[0, 0], expected.shape))
    raise AssertionError(
        f"{name} differs in {len(want)} of {expected.numel()} elements, by {float(largest):.3g} at most; "
        f"first at {first}: expected {want[0].item()}, got {have[0].item()}"
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """The elements' bytes, one row an element."""
    resolved = tensor.detach().resolve_conj().resolve_neg()
    flat = resolved.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
