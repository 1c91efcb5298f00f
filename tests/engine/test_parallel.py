"""``scrimp.parallel`` does what the serial line does, bit by bit, from threads."""

from __future__ import annotations

import contextvars
import faulthandler
import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scrimp

Branch = Callable[..., Any]


class Cube(torch.autograd.Function):
    """A custom Function; raises in its backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: bool) -> Tensor:
        """Save the input."""
        ctx.save_for_backward(x)
        ctx.fault = fault
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Three times the square, or an error."""
        if ctx.fault:
            raise ArithmeticError("in a branch")
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2, None


class RandomBranches:
    """A step with random branches over shared inputs and parameters; the same seed gives the same step."""

    def __init__(self, seed: int, *, fault: bool = False) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(4)]
        self.log: list[str] = []
        self.leaves[1].register_hook(lambda gradient: self.log.append("hook") or gradient * 1.5)
        self.count = self.random.randint(2, 5)
        self.faulty = self.random.randrange(self.count) if fault else -1
        self.branches = [self._branch(index) for index in range(self.count)]

    def _branch(self, index: int) -> Branch:
        steps = [self.random.randrange(8) for _ in range(self.random.randint(1, 6))]
        weights = [self.random.choice(self.leaves) for _ in steps]
        late = self.random.random() < 0.5

        def branch(x: Tensor, y: Tensor) -> dict[str, Any]:
            if index == self.faulty and not late:
                raise ArithmeticError("in a branch")
            z = x * 1.0
            for step, weight in zip(steps, weights, strict=True):
                z = self._apply(step, z, weight, y)
            if index == self.faulty:
                z = Cube.apply(z, True)
            return {"z": z, "more": (z.sum() * index, x, weights[0], index), "unused": z.sin()}

        return branch

    def _apply(self, step: int, z: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        match step:
            case 0:
                return torch.tanh(z @ weight)
            case 1:
                return z * torch.sigmoid(y) + weight
            case 2:
                return torch.cat([z[:2] * weight[2:], y[:2]])
            case 3:
                return Cube.apply(z.sin(), False)
            case 4:
                return checkpoint(lambda a, b: torch.tanh(a @ b), z, weight, use_reentrant=False)
            case 5:
                first, *others = z.unbind(0)
                return torch.stack([first * 2, *others]).cos()
            case 6:
                copy = z.sin()
                copy[0] *= 2
                return copy + y
            case _:
                return z.softmax(1) * y

    def loss(self, run: Callable[..., list[Any]]) -> Tensor:
        """The forward pass; ``run`` runs the branches."""
        a, b, c, d = self.leaves
        x, y = torch.tanh(a @ b), torch.sin(c)
        results = run(self.branches, x, y)
        loss = (x * 0.5 + y).sum() + d.sum()
        for result in results:
            total, same, weight, index = result["more"]
            loss = loss + (result["z"] * same).sum() + total * 0.1 + (weight * index).mean()
        return loss + (x.square() * results[0]["z"]).sum()

    def outcome(self, run: Callable[..., list[Any]]) -> list[Any]:
        """The loss, gradients and log of a whole step, or its error."""
        try:
            loss = self.loss(run)
            scrimp.backward(loss)
        except ArithmeticError as error:
            return [repr(error), self.log]
        return [loss.detach(), *[leaf.grad for leaf in self.leaves], self.log]


def serially(branches: list[Branch], *inputs: Any) -> list[Any]:
    """What ``parallel`` promises to be equal to."""
    return [branch(*inputs) for branch in branches]


def in_threads(workers: int) -> Callable[..., list[Any]]:
    """``parallel`` with a number of workers."""
    return lambda branches, *inputs: scrimp.parallel(branches, *inputs, workers=workers)


def assert_same_outcome(ours: list[Any], theirs: list[Any]) -> None:
    """Tensors have the same bits, everything else is equal."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


def test_assert_same_outcome_fails_on_other_bits() -> None:
    """The comparison sees one unit in the last place."""
    one = torch.ones(1)
    with pytest.raises(AssertionError):
        assert_same_outcome([one], [torch.nextafter(one, one + 1)])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 600), marks=pytest.mark.slow)], ids=["100", "600"]
)
def test_gradients_are_bit_identical(seeds: range, workers: int) -> None:
    """Loss, gradients and hooks of random branches are those of the serial line."""
    for seed in seeds:
        faulthandler.dump_traceback_later(120, exit=True)
        ours = RandomBranches(seed).outcome(in_threads(workers))
        assert_same_outcome(ours, RandomBranches(seed).outcome(serially))
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=["100", "1000"]
)
def test_a_fault_surfaces_once_and_leaves_no_thread(seeds: range) -> None:
    """Errors injected into branches, forward or backward, are those of the serial line; no thread stays.

    Each runs under a watchdog that ends the process when the step hangs.
    """
    threads = threading.active_count()
    for seed in seeds:
        faulthandler.dump_traceback_later(120, exit=True)
        theirs = RandomBranches(seed, fault=True).outcome(serially)
        ours = RandomBranches(seed, fault=True).outcome(in_threads(2))
        assert ours[0] == theirs[0] == "ArithmeticError('in a branch')"
        assert threading.active_count() == threads
        faulthandler.cancel_dump_traceback_later()


def test_branches_run_at_the_same_time() -> None:
    """Two branches that wait for each other both finish, forward and backward."""
    barrier = threading.Barrier(2, timeout=20)

    def meet(_: Tensor) -> None:
        barrier.wait()

    def branch(x: Tensor) -> Tensor:
        barrier.wait()
        y = x * 2
        y.register_hook(meet)
        return y

    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([branch, branch], x, workers=2)
    (first + second).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 4.0))


def test_branches_are_one_node_of_the_outer_graph() -> None:
    """What the branches return comes from a single node."""
    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([torch.sin, torch.cos], x, workers=2)
    assert first.grad_fn is second.grad_fn


def test_autograd_grad_and_retain_graph_work() -> None:
    """``torch.autograd.grad`` finds parameters behind the node, and a retained graph can be run again."""
    x, w = torch.randn(3, 3).requires_grad_(), torch.randn(3, 3).requires_grad_()
    loss = sum(scrimp.parallel([lambda x: (x @ w).sum(), lambda x: (x * w).sum()], x, workers=2))
    plain = (x @ w).sum() + (x * w).sum()
    expected = torch.autograd.grad(plain, [x, w])
    assert_same_outcome(list(torch.autograd.grad(loss, [x, w], retain_graph=True)), list(expected))
    assert_same_outcome(list(torch.autograd.grad(loss, [x, w])), list(expected))
    with pytest.raises(scrimp.errors.GraphFreedError):
        scrimp.backward(loss)


def test_differentiating_twice_is_refused() -> None:
    """``create_graph=True`` is an error that says what to do."""
    x = torch.ones(2, requires_grad=True)
    loss = sum(scrimp.parallel([torch.sin, torch.cos], x, workers=2)).sum()
    with pytest.raises(scrimp.errors.BranchError, match="workers=1"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_nothing_is_recorded_without_grad() -> None:
    """Under ``torch.no_grad`` the branches' results have no history."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        results = scrimp.parallel([torch.sin, lambda x: torch.is_grad_enabled()], x, workers=2)
    assert results[0].grad_fn is None
    assert results[1] is False


def test_workers_see_the_callers_surroundings() -> None:
    """Grad mode, inference mode, autocast, context variables and the number of threads are the caller's."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    barrier = threading.Barrier(2, timeout=20)

    def look(x: Tensor) -> tuple[Any, ...]:
        barrier.wait()
        return (
            variable.get(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch._C._is_fwd_grad_enabled(),
            (x @ x).dtype,
        )

    before = torch.get_num_threads()
    variable.set("here")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), _set_fwd_grad_enabled(False):
        seen = scrimp.parallel([look, look], torch.ones(2, 2), workers=2, threads_per_worker=1)
    assert seen[0] == seen[1] == ("here", True, torch.bfloat16, True, 1, False, torch.bfloat16)
    assert torch.get_num_threads() == before


class CountingDispatch(TorchDispatchMode):
    """Notes the threads in which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the thread."""
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


class PlainFunctionMode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        CountingDispatch,
        PlainFunctionMode,
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.set_multithreading_enabled(False),
    ],
)
def test_branches_run_plainly_where_something_follows_one_thread(mode: Any) -> None:
    """Modes and saved-tensor hooks see operators in sequence: all run in the caller's thread."""
    threads: set[int] = set()
    with mode():
        x = torch.ones(2, requires_grad=True)
        first, second = scrimp.parallel([lambda x: threads.add(threading.get_ident()) or x * 2] * 2, x, workers=2)
    assert threads == {threading.get_ident()}
    assert first.grad_fn is not second.grad_fn


def test_a_dispatch_mode_around_backward_sees_every_operator() -> None:
    """The branches' backward runs in the caller's thread when a mode watches it."""
    x = torch.ones(2, 2, requires_grad=True)
    loss = sum(scrimp.parallel([lambda x: (x @ x).sum(), lambda x: x.exp().sum()], x, workers=2))
    with CountingDispatch() as mode:
        scrimp.backward(loss)
    assert mode.threads == {threading.get_ident()}


def test_random_numbers_in_threads_are_refused() -> None:
    """Who draws what would be chance: an error, and the generator is as it was."""
    state = torch.get_rng_state()
    with pytest.raises(scrimp.errors.BranchError, match="generator"):
        scrimp.parallel([torch.dropout] * 2, torch.ones(8), 0.5, True, workers=2)
    assert torch.equal(state, torch.get_rng_state())


def test_random_numbers_in_one_worker_are_the_serial_ones() -> None:
    """With one worker dropout is that of the serial line."""
    torch.manual_seed(0)
    theirs = serially([torch.dropout] * 2, torch.ones(8), 0.5, True)
    torch.manual_seed(0)
    assert_same_outcome(scrimp.parallel([torch.dropout] * 2, torch.ones(8), 0.5, True, workers=1), theirs)


def test_checkpoints_in_branches_leave_the_generator_alone() -> None:
    """Later draws are those of the step without threads."""
    x = torch.ones(4, 4, requires_grad=True)
    branches = [lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum()] * 4
    loss = sum(scrimp.parallel(branches, x, workers=2))
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_tensor_captured_by_two_branches_is_refused() -> None:
    """Two branches over one outer activation would run its node twice."""
    x = torch.ones(2, requires_grad=True)
    hidden = x.sin()
    with pytest.raises(scrimp.errors.BranchError, match=r"SinBackward0.*as an input"):
        scrimp.parallel([lambda x: x * hidden, lambda x: x + hidden], x, workers=2)


def test_a_captured_tensor_of_the_outer_pass_is_refused() -> None:
    """One branch over an activation that the outer pass runs as well is an error, not a wrong sum."""
    x = torch.ones(2, requires_grad=True)
    hidden = x.sin()
    first, second = scrimp.parallel([lambda x: x * hidden, lambda x: x + 1], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="SinBackward0"):
        (first + second + hidden).sum().backward()


def test_a_hook_on_a_branchs_input_is_refused() -> None:
    """It would see a part of the gradient only."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(scrimp.errors.BranchError, match="registered a hook"):
        scrimp.parallel([lambda x: x.register_hook(print) and x * 2, torch.sin], x, workers=2)


def test_a_tensor_that_slips_out_of_a_branch_is_refused() -> None:
    """A tensor that was kept and not returned would lose the gradient of the inputs: an error."""
    x = torch.ones(2, requires_grad=True)
    kept: list[Tensor] = []
    scrimp.parallel([lambda x: kept.append(x.sin()), torch.cos], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="return"):
        scrimp.backward(kept[0].sum())


def test_a_result_in_an_unknown_container_is_refused() -> None:
    """Tensors inside of an object that is no nest are not found, so using them is an error, not a gradient of zero."""

    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    x = torch.ones(2, requires_grad=True)
    first, second = scrimp.parallel([lambda x: Box(x.sin()), torch.cos], x, workers=2)
    with pytest.raises(scrimp.errors.BranchError, match="nest"):
        (first.value + second).sum().backward()


def test_changing_an_input_in_place_is_refused() -> None:
    """A branch that writes to what the others read does not get away with it."""
    x = torch.ones(2, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="inplace"):
        scrimp.parallel([lambda x: x.mul_(2), torch.sin], x, workers=2)


def test_changing_a_result_that_backward_needs_is_noticed() -> None:
    """In-place operators on a branch's result raise, as they do on any saved tensor."""
    x = torch.ones(2, requires_grad=True)
    first, _ = scrimp.parallel([torch.sigmoid, torch.sin], x, workers=2)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        first.mul_(2).sum().backward()


def test_an_input_is_not_kept_for_longer_than_without() -> None:
    """An activation that no branch saves dies when its last user is gone."""
    x = torch.ones(4, requires_grad=True) * 2
    storage = weakref.ref(x.untyped_storage())
    results = scrimp.parallel([lambda x: x + 1, lambda x: x + 2], x, workers=2)
    del x
    gc.collect()
    assert storage() is None
    sum(results).sum().backward()


def test_a_branch_without_gradient_is_freed_with_the_others() -> None:
    """What a branch saved whose result is not used dies with the pass, although the loss lives on."""
    x = torch.ones(4, requires_grad=True)
    kept: list[Any] = []

    def unused(x: Tensor) -> Tensor:
        y = x * 2
        kept.append(weakref.ref(y.untyped_storage()))
        return y.square()

    first, second = scrimp.parallel([torch.sin, unused], x, workers=2)
    loss = first.sum()
    del first, second
    loss.backward(retain_graph=True)
    assert kept[0]() is not None
    loss.backward()
    gc.collect()
    assert kept[0]() is None
    with pytest.raises(scrimp.errors.GraphFreedError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_a_branch_raises_in_a_thread_surfaces(kind: type[BaseException]) -> None:
    """Also what is no ``Exception``."""
    barrier = threading.Barrier(2, timeout=20)

    def branch(x: Tensor) -> Tensor:
        barrier.wait()
        if threading.current_thread() is not threading.main_thread():
            raise kind
        return x

    with pytest.raises(kind):
        scrimp.parallel([branch, branch], torch.ones(1), workers=2)


def test_a_worker_that_cannot_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong before the first task surfaces too, and no thread stays."""
    threads = threading.active_count()
    before = torch.set_num_threads

    def fail(number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no threads left")
        before(number)

    monkeypatch.setattr(torch, "set_num_threads", fail)
    with pytest.raises(OSError, match="no threads left"):
        scrimp.parallel([lambda x: time.sleep(0.02) or x] * 4, torch.ones(1), workers=2)
    assert threading.active_count() == threads


def test_an_interrupt_ends_every_thread() -> None:
    """Ctrl-C while branches run raises ``KeyboardInterrupt`` once the threads have ended."""
    threads = threading.active_count()
    main = threading.main_thread()

    def branch(x: Tensor) -> Tensor:
        if threading.current_thread() is not main:
            signal.raise_signal(signal.SIGINT)
        else:
            time.sleep(0.05)
        return x

    with pytest.raises(KeyboardInterrupt):
        scrimp.parallel([branch] * 6, torch.ones(1), workers=2)
    assert threading.active_count() == threads


def test_a_parallel_inside_a_parallel() -> None:
    """Branches may have branches."""
    x = torch.randn(3, 3, requires_grad=True)

    def run(of: Callable[..., list[Any]]) -> list[Any]:
        x.grad = None
        sum(of([lambda x: sum(of([torch.sin, torch.cos], x)), torch.tanh], x)).sum().backward()
        return [x.grad]

    assert_same_outcome(run(in_threads(2)), run(serially))


def test_a_branch_inside_a_checkpoint_is_recomputed() -> None:
    """Around a checkpoint and inside of it the gradient is the serial one."""
    x = torch.randn(3, 3, requires_grad=True)

    def run(of: Callable[..., list[Any]], reentrant: bool) -> list[Any]:
        x.grad = None
        inner = lambda y: sum(of([torch.sin, torch.cos], y))  # noqa: E731
        checkpoint(inner, x.tanh(), use_reentrant=reentrant).sum().backward()
        return [x.grad]

    for reentrant in (False, True):
        assert_same_outcome(run(in_threads(2), reentrant), run(serially, reentrant))
