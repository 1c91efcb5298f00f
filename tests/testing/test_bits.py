"""`assert_same_tensor` passes equal bits of every layout, and fails on garbage."""

import warnings

import pytest
import torch

from scrimp.testing import assert_same_tensor


def of_every_layout() -> dict[str, torch.Tensor]:
    """One small tensor of each kind that the comparison knows."""
    dense = torch.arange(12.0).reshape(3, 4)
    return {
        "strided": dense,
        "transposed": dense.t(),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "one element of a wide stride": torch.ones(8)[::8],
        "zero-dimensional": torch.tensor(2.0),
        "bfloat16": dense.bfloat16(),
        "integer": dense.int(),
        "bool": dense > 5,
        "complex": torch.complex(dense, -dense),
        "conjugate view": torch.complex(dense, -dense).conj(),
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "nested": torch.nested.nested_tensor([dense[0], dense[1, :2]]),
        "jagged": torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=torch.jagged),
    }


with warnings.catch_warnings():  # nested and compressed layouts say on first use that they are prototypes
    warnings.simplefilter("ignore")
    LAYOUTS = of_every_layout()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_tensors_pass(layout: str) -> None:
    """A copy has the same bits, whatever the layout."""
    assert_same_tensor("x", LAYOUTS[layout], LAYOUTS[layout].clone())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_value_fails(layout: str) -> None:
    """One changed element is found, whatever the layout."""
    same = LAYOUTS[layout]
    changed = change_last_element(same)
    with pytest.raises(AssertionError, match=r"x.* differs"):
        assert_same_tensor("x", same, changed)


def change_last_element(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which the last stored element has another value."""
    copy = tensor.clone()
    if tensor.layout == torch.sparse_coo:
        last = copy._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        last = copy.values()
    elif tensor.is_nested:
        last = copy.unbind()[-1]
    else:
        last = copy
    last = last[(-1,) * last.ndim]
    last.copy_(last + 1 if tensor.dtype != torch.bool else ~last)
    return copy


def test_one_flipped_bit_fails() -> None:
    """The last bit of the mantissa is enough."""
    x = torch.randn(100, dtype=torch.float64)
    y = x.clone()
    y.view(torch.int64)[37] ^= 1
    with pytest.raises(AssertionError, match=r"x differs in 1 of 100 elements, by .*e-1\d at most; first at \(37,\)"):
        assert_same_tensor("x", x, y)


def test_nan_equals_nan_and_zero_differs_from_minus_zero() -> None:
    """Bits count, not values."""
    nan = torch.tensor([float("nan"), 0.0])
    assert_same_tensor("x", nan, nan.clone())
    with pytest.raises(AssertionError, match=r"first at \(1,\): expected 0.0, got -0.0"):
        assert_same_tensor("x", nan, torch.tensor([float("nan"), -0.0]))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (torch.zeros(3), "shape"),
        (torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "device"),
        (torch.nn.Parameter(torch.zeros(2)), "type"),
        (torch.zeros(2, requires_grad=True), "requires_grad"),
    ],
)
def test_other_attributes_fail(other: torch.Tensor, what: str) -> None:
    """A tensor that differs in more than its values is named with what differs."""
    with pytest.raises(AssertionError, match=f"x differs in {what}"):
        assert_same_tensor("x", torch.zeros(2), other)


def test_another_number_of_parts_fails() -> None:
    """Nested tensors with fewer components are named so."""
    two = LAYOUTS["nested"]
    one = torch.nested.nested_tensor([two.unbind()[0]])
    with pytest.raises(AssertionError, match="x differs in parts"):
        assert_same_tensor("x", two, one)


def test_none_equals_only_none() -> None:
    """A missing gradient is not a gradient of zeros."""
    assert_same_tensor("g", None, None)
    with pytest.raises(AssertionError, match=r"g differs: expected None, got a tensor of shape \(2,\)"):
        assert_same_tensor("g", None, torch.zeros(2))
    with pytest.raises(AssertionError, match=r"g differs: expected a tensor of shape \(2,\), got None"):
        assert_same_tensor("g", torch.zeros(2), None)
