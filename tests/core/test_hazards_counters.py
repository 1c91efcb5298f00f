"""Hazards: version counters, by which autograd and sessions alike know that memory was overwritten."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import scrimp
from scrimp.policy import KeepNone
from scrimp.testing import Step, assert_same_step

WRITES: dict[str, Callable[[Tensor], object]] = {
    "one by one": lambda a: torch._foreach_mul_([a], 0.5),
    "the same one twice": lambda a: torch._foreach_add_([a, a], 1.0),
    "through a view as well": lambda a: torch._foreach_mul_([a, a.view(-1)], 0.5),
}
lists = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@lists
def test_lists_that_are_written_count_as_without_a_session(write: Callable[[Tensor], object]) -> None:
    """PyTorch's dispatch modes switch off what counts those writes on a CPU."""
    plain, ours = torch.ones(2, 3), torch.ones(2, 3)
    write(plain)
    with scrimp.session(KeepNone()):
        write(ours)
    assert ours._version == plain._version > 0


@lists
def test_a_view_of_what_a_list_writes(write: Callable[[Tensor], object]) -> None:
    """A view that was taken before has the new history, which autograd looks up when the counter has risen."""

    def make() -> Step:
        p = torch.randn(3, 4, requires_grad=True)

        def forward() -> Tensor:
            c = p.sin()
            view = c.view(-1)
            write(c)
            return (view.square() + 1).log()

        return Step(forward, state=p)

    assert_same_step(make, lambda: scrimp.session(KeepNone()))


def test_a_list_that_writes_what_was_saved_before_the_session() -> None:
    """Autograd itself refuses, as it does without one."""
    p = torch.randn(3, requires_grad=True)
    y = p.exp()
    with scrimp.session(KeepNone()):
        torch._foreach_mul_([y.detach()], 2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@lists
def test_replays_start_from_what_a_list_wrote(write: Callable[[Tensor], object]) -> None:
    """An input that is written before it is read is taken as it is then."""

    def make() -> Step:
        p, x = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)

        def forward() -> Tensor:
            write(x)
            return (x.clone() * p).exp() * x

        return Step(forward, state=(p, x))

    assert_same_step(make, lambda: scrimp.session(KeepNone()))


FAILURES: dict[str, Callable[[Tensor], object]] = {
    "another geometry": lambda a: a.t_(),
    "a write": lambda a: a.mul_(torch.ones(7)),
    "a write that had begun": lambda a: a.__setitem__(torch.tensor([0, 9]), 1.0),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_an_operator_that_fails_has_counted_nothing(fail: Callable[[Tensor], object], own: bool) -> None:
    """A program may catch its error and go on with the tensor."""

    def make() -> Step:
        p, x = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)

        def forward() -> Tensor:
            a = x * 1 if own else x
            y = (a * p).exp()
            with pytest.raises((RuntimeError, IndexError)):
                fail(a)
            return (y * a * p).sin()

        return Step(forward, state=(p, x))

    assert_same_step(make, lambda: scrimp.session(KeepNone()))
