"""`live_bytes` counts each storage once, from its making to its death."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.testing import live_bytes

KILO = 1000 * 4  # bytes of torch.zeros(1000)


def test_a_storage_lives_until_its_last_view_dies() -> None:
    """Views add nothing, and keep their storage alive."""
    with live_bytes() as count:
        base = torch.zeros(1000)
        view = base.view(10, 100)[3]
        assert (count.now, count.peak) == (KILO, KILO)
        del base
        assert count.now == KILO
        del view
        assert (count.now, count.peak) == (0, KILO)


def test_what_is_older_than_the_block_counts_nothing() -> None:
    """Parameters and inputs, their views, and what is written into them stay out."""
    old = torch.zeros(1000)
    with live_bytes() as count:
        view = old.view(10, 100)
        view.add_(1)
        torch.add(old, 1, out=old)
        assert count.peak == 0


def test_what_autograd_saves_counts_until_backward() -> None:
    """A saved activation is alive although no Python name holds it, and dies with the graph."""
    x = torch.zeros(1000, requires_grad=True)
    with live_bytes() as count:
        loss = x.exp().sum()
        assert count.now == KILO + 4
        loss.backward()
        del loss
        assert count.now == KILO  # the gradient
        x.grad = None
        assert count.now == 0


def test_counting_goes_on_after_the_block() -> None:
    """What was made inside is given back when it dies outside."""
    with live_bytes() as count:
        x = torch.zeros(1000)
    assert count.now == KILO
    del x
    assert (count.now, count.peak) == (0, KILO)


def test_the_peak_sees_temporaries() -> None:
    """Operands and result of one expression are alive together."""
    with live_bytes() as count:
        result = torch.zeros(1000).exp() + torch.zeros(1000).exp()
        del result
    assert count.peak == 3 * KILO


def test_literals_count() -> None:
    """`torch.tensor` makes its storage before any operator is dispatched."""
    with live_bytes() as count:
        x = torch.tensor([1.0, 2.0])
        assert count.now == 8
        del x
        assert count.now == 0


def test_a_resized_storage_counts_its_new_size() -> None:
    """`out=` grows an empty tensor."""
    with live_bytes() as count:
        out = torch.empty(0)
        torch.add(torch.zeros(1000), 1, out=out)
        assert count.now == KILO


def test_fake_and_meta_tensors_count_nothing() -> None:
    """Only real storages take memory."""
    with live_bytes() as count:
        x = torch.empty(1000, device="meta")
        with FakeTensorMode():
            y = torch.empty(1000)
        assert count.peak == 0
        del x, y


def test_sparse_tensors_count_their_parts() -> None:
    """Indices and values of a sparse tensor are storages."""
    with live_bytes() as count:
        x = torch.eye(100).to_sparse()
        assert count.now == 100 * (2 * 8 + 4)
        del x
        assert count.now == 0


def test_garbage_that_is_kept_is_found() -> None:
    """A leak of one tensor a step shows as growth."""
    leak = []
    with live_bytes() as count:
        for _ in range(3):
            leak.append(torch.zeros(1000))
        with pytest.raises(AssertionError):
            assert count.now == KILO


@pytest.mark.slow
def test_the_first_count_in_a_process_is_right() -> None:
    """A mode that imports the compiler when it is first called, as PyTorch's do, would keep results alive."""
    program = """
import gc, torch, scrimp
from scrimp.testing import live_bytes
gc.disable()
def count():
    x = torch.ones(4, 8, requires_grad=True)
    with live_bytes() as counted:
        y = scrimp.checkpoint(lambda x: torch.nn.functional.layer_norm(x, (8,)).sin(), x)
        del y
        return counted.now
print(count(), count())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "0"]
