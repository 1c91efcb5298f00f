"""Backward again, double backward, nesting, identity, layouts and subclasses."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import scrimp
from scrimp.errors import SessionError
from scrimp.policy import EveryN, KeepAll, KeepNone, Online


def chain(x: Tensor) -> Tensor:
    """A few operators that save their inputs or results."""
    return (x.sin().exp() * x.cos()).tanh().sigmoid()


def test_repeated_partial_gradients_do_not_grow() -> None:
    """Twenty passes with ``retain_graph`` give the same bits, and each leaves nothing behind that was dropped."""
    x = torch.randn(100, dtype=torch.float64, requires_grad=True)
    with scrimp.session(KeepNone()) as session:
        y = chain(x)
    plain = torch.autograd.grad(chain(x).sum(), x)[0]
    held = set()
    for _ in range(20):
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(gradient, plain)
        held.add((session.statistics.kept.bytes, session.statistics.dropped.bytes))
    assert len(held) == 1
    assert held.pop()[0] == 0
    del y
    assert session.statistics.made.bytes == 0


def test_gradients_of_intermediates() -> None:
    """``autograd.grad`` with respect to a value in the middle of a region."""
    x = torch.randn(10, requires_grad=True)
    with scrimp.session(KeepNone()):
        middle = x.sin()
        y = middle.exp().tanh()
    (ours,) = torch.autograd.grad(y.sum(), middle)
    other = x.sin()
    (plain,) = torch.autograd.grad(other.exp().tanh().sum(), other)
    assert torch.equal(ours, plain)


def test_double_backward() -> None:
    """The graph of the gradient is that of plain autograd."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def second(f: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x)
        return result

    assert torch.equal(second(lambda x: scrimp.checkpoint(chain, x)), second(chain))


def test_gradgradcheck() -> None:
    """First and second derivatives agree with finite differences."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def region(x: Tensor, w: Tensor) -> Tensor:
        return scrimp.checkpoint(lambda x: (chain(x) * w).exp(), x)

    assert torch.autograd.gradcheck(region, (x, w))
    assert torch.autograd.gradgradcheck(region, (x, w))


def test_double_backward_inside_the_session() -> None:
    """What the first backward saves is under the session too."""
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def run() -> Tensor:
        (first,) = torch.autograd.grad(chain(x).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x)
        return result

    with scrimp.session(KeepNone()):
        ours = run()
    assert torch.equal(ours, run())


def test_two_forwards_before_backward() -> None:
    """Passes of one session that overlap in time do not mix."""
    x, z = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    session = scrimp.session(KeepNone())
    with session:
        first = chain(x)
    with session:
        second = chain(z)
    first.sum().backward()
    second.sum().backward()
    plain = copy.deepcopy((x.detach(), z.detach()))
    for ours, data in zip((x, z), plain, strict=True):
        data.requires_grad_()
        chain(data).sum().backward()
        assert torch.equal(ours.grad, data.grad)
    assert session.statistics.made.bytes == 0


def test_output_of_one_session_feeds_another() -> None:
    """The second starts from the first one's result."""
    x = torch.randn(5, requires_grad=True)
    y = x
    for _ in range(3):
        y = scrimp.checkpoint(chain, y)
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(x))).sum(), x)
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("outer", [KeepAll(), KeepNone(), EveryN(2), Online(60)])
@pytest.mark.parametrize("inner", [KeepAll(), KeepNone(), EveryN(2)])
def test_nested_sessions(outer: scrimp.policy.Policy, inner: scrimp.policy.Policy) -> None:
    """A checkpoint inside a session inside a checkpoint."""
    x = torch.randn(5, requires_grad=True)

    def middle(x: Tensor) -> Tensor:
        y = chain(x)
        with scrimp.session(outer):
            y = scrimp.checkpoint(chain, y, policy=inner).exp()
            y = scrimp.checkpoint(chain, y, policy=inner)
        return y.sin()

    y = scrimp.checkpoint(middle, x, policy=inner)
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(x)).exp()).sin().sum(), x)
    assert torch.equal(x.grad, plain)


def test_nested_checkpoints_replay_region_by_region() -> None:
    """A region within a dropped region keeps nothing, and backward holds one inner region's values at a time."""
    x = torch.randn(1000, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        for _ in range(8):
            x = scrimp.checkpoint(chain, x)
        return x

    with scrimp.session(KeepNone()) as session:
        y = outer(x)
    assert session.statistics.kept.bytes == 0
    y.sum().backward()
    inputs_of_regions = 7
    assert session.statistics.kept.peak_bytes <= (inputs_of_regions + 3) * 4000
    operators_of_a_region = 6
    assert session.statistics.replayed_operators <= 8 * operators_of_a_region * 2
    (plain,) = torch.autograd.grad(outer(x).sum(), x)
    assert torch.equal(x.grad, plain)


def test_a_region_keeps_its_input_under_a_keeping_session() -> None:
    """Chained regions in a session that keeps: each is replayed from its own input, not from the beginning."""
    x = torch.randn(1000, requires_grad=True)
    with scrimp.session(EveryN(1)) as session:
        y = x
        for _ in range(4):
            y = scrimp.checkpoint(chain, y)
    assert session.statistics.kept.bytes == 3 * 4000
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(chain(chain(chain(x)))).sum(), x)
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_inside_ours(reentrant: bool) -> None:
    """Torch's region runs its own hooks; around it we go on."""
    x = torch.randn(5, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return torch_checkpoint(chain, chain(x), use_reentrant=reentrant).exp().sin()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x) if not reentrant else (None,)
    if reentrant:
        scrimp.checkpoint(region, x).sum().backward()
        ours = x.grad
    (plain,) = torch.autograd.grad(chain(chain(x)).exp().sin().sum(), x)
    assert torch.equal(ours, plain)


def test_ours_inside_torch_checkpoint() -> None:
    """Torch repeats the Python code of its region, ours within it too."""
    x = torch.randn(5, requires_grad=True)
    y = torch_checkpoint(lambda x: scrimp.checkpoint(chain, chain(x)).exp(), x, use_reentrant=False)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(chain(chain(x)).exp().sum(), x)
    assert torch.equal(ours, plain)


def test_save_on_cpu_inside_ours() -> None:
    """Other saved-tensor hooks inside take over what is saved there."""
    x = torch.randn(5, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = chain(x)
        return chain(y)

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(chain(x)).sum(), x)
    assert torch.equal(ours, plain)


def test_hooks_fire_once() -> None:
    """Module hooks, tensor hooks and Python side effects happen as often as without scrimp."""
    counts = {"module": 0, "full": 0, "tensor": 0, "python": 0}
    layer = nn.Linear(4, 4)

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    layer.register_forward_hook(count("module"))
    layer.register_full_backward_hook(count("full"))

    def region(x: Tensor) -> Tensor:
        counts["python"] += 1
        y = layer(x).relu()
        y.register_hook(count("tensor"))
        return y.exp()

    x = torch.randn(2, 4, requires_grad=True)
    scrimp.checkpoint(region, x).sum().backward()
    assert counts == {"module": 1, "full": 1, "tensor": 1, "python": 1}


def test_input_gradient_accumulates_once() -> None:
    """An input that is used in several places gets each contribution once."""
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), 10.0)
    scrimp.checkpoint(lambda a, b: a * b + a, x, x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 13.0))


def test_exception_in_a_region_restores_everything() -> None:
    """After an error inside, operators are not recorded any more and saved tensors are plain."""
    x = torch.randn(3, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        x.exp()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scrimp.checkpoint(fails, x)
    y = x.exp()
    assert y.grad_fn._raw_saved_result is not None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


def test_early_return_and_internal_generators() -> None:
    """Control flow inside the region is its own business."""
    x = torch.randn(3, requires_grad=True)

    def region(x: Tensor, stop: int) -> Tensor:
        def steps() -> Iterator[Tensor]:
            y = x
            while True:
                y = y.sin().exp()
                yield y

        for count, y in enumerate(steps()):
            if count == stop:
                return y
        raise AssertionError

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x, 2).sum(), x)
    (plain,) = torch.autograd.grad(region(x, 2).sum(), x)
    assert torch.equal(ours, plain)


def test_generator_functions_are_refused() -> None:
    """A generator does its work after the region has ended, which cannot help: an error says so."""

    def region(x: Tensor) -> Iterator[Tensor]:
        yield x.exp()

    with pytest.raises(SessionError, match="generator"):
        scrimp.checkpoint(region, torch.ones(2, requires_grad=True))


def test_nothing_of_ours_is_left_after_backward() -> None:
    """Reference counting alone frees every value, with the garbage collector switched off."""
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(100, requires_grad=True)
        with scrimp.session(KeepNone()) as session:
            middle = x.exp()
            storage = weakref.ref(middle.untyped_storage())
            y = middle.sin().tanh()
        del middle
        assert storage() is None
        y.sum().backward()
        assert session.statistics.made.count == session.statistics.kept.count == 0
    finally:
        gc.enable()


def test_a_result_that_the_user_holds_keeps_nothing_else_alive() -> None:
    """Holding a result after backward does not hold what it was computed from."""
    x = torch.randn(100, requires_grad=True)
    with scrimp.session(EveryN(1)) as session:
        middle = x.exp()
        storage = weakref.ref(middle.untyped_storage())
        y = middle.sin()
        y.sum().backward()
        del middle
        assert storage() is None
        assert session.statistics.kept.bytes == 0


def test_graph_that_is_thrown_away_frees_its_values() -> None:
    """Without backward, the last reference to the graph takes everything with it."""
    x = torch.randn(100, requires_grad=True)
    with scrimp.session(EveryN(2)) as session:
        y = chain(x)
    assert session.statistics.made.bytes > 0
    del y
    assert session.statistics.made.bytes == session.statistics.kept.bytes == session.statistics.dropped.bytes == 0


def test_multi_output_lists_and_undefined_tensors() -> None:
    """Operators that return tuples or lists, take lists of tensors, or return nothing in some place."""
    torch.manual_seed(0)

    def region(x: Tensor) -> Tensor:
        values, indices = x.topk(2, dim=1)
        pieces = torch.stack([*x.exp().unbind(0), *torch.split(x.sin(), 1, 0)[0]])
        joined = torch.cat([values.exp(), *torch._foreach_exp([values, values * 2])], 1)
        normed = nn.functional.layer_norm(joined.tanh(), [6])
        return normed.sum() + pieces.tanh().sum() + x.gather(1, indices).exp().sum()

    x = torch.randn(3, 4, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x), x)
    (plain,) = torch.autograd.grad(region(x), x)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_zero_size_and_scalar_tensors(shape: tuple[int, ...]) -> None:
    """Empty storages and zero-dimensional tensors are values like others."""
    x = torch.ones(shape, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(chain, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(ours, plain)


def test_complex_conjugates_and_negative_views() -> None:
    """Lazy conjugation and negation are part of how a tensor looks at its storage."""

    def region(x: Tensor) -> Tensor:
        z = torch.complex(x.sin(), x.cos())
        return ((z.conj() * z.exp()).imag.exp() * z.conj().imag).sin() + torch.view_as_real(z.conj() @ z).sum()

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors() -> None:
    """What has no strided storage is kept whole."""

    def region(x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), x.exp()[:2], (2, 2), check_invariants=False)
        return torch.sparse.mm(sparse * 2, x.sin().view(2, 2)).tanh()

    x = torch.randn(4, requires_grad=True)
    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    """Nested layouts, strided and jagged, go through."""

    def region(x: Tensor, layout: torch.layout) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2].exp(), x[1:].sin()], layout=layout)
        return torch.nested.to_padded_tensor(nested.sin() * 2, 0.0).tanh()

    for layout in (torch.strided, torch.jagged):
        x = torch.randn(4, 3, requires_grad=True)
        (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x, layout).sum(), x)
        (plain,) = torch.autograd.grad(region(x, layout).sum(), x)
        assert torch.equal(ours, plain)


def test_subclass_that_takes_itself_apart() -> None:
    """Of a wrapper subclass, the plain tensors within are dropped and replayed."""

    def gradient(checkpointed: bool) -> tuple[Tensor, Tensor, int]:
        x = TwoTensor(torch.linspace(0, 1, 4), torch.linspace(1, 2, 4)).requires_grad_()
        with scrimp.session(KeepNone() if checkpointed else KeepAll()) as session:
            y = chain(x)
        dropped = session.statistics.dropped.count
        y.sum().backward()
        return x.grad.a, x.grad.b, dropped

    ours, plain = gradient(True), gradient(False)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert ours[2] > 0


def test_parametrized_subclass_without_dispatch() -> None:
    """A mere Python subclass of Tensor is a plain tensor to us."""

    class Mine(Tensor):
        pass

    x = torch.randn(4).as_subclass(Mine).requires_grad_()
    (ours,) = torch.autograd.grad(scrimp.checkpoint(chain, x).sum(), x)
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(ours, plain)


def test_functional_call_swaps_parameters() -> None:
    """A region that runs a module with other parameters is replayed with those."""
    layer = nn.Linear(4, 4)
    other = {name: (p.detach() * 2).requires_grad_() for name, p in layer.named_parameters()}
    x = torch.randn(2, 4)

    def loss(checkpointed: bool) -> Tensor:
        def region(x: Tensor) -> Tensor:
            return layer(x).tanh().exp()

        def whole(x: Tensor) -> Tensor:
            return scrimp.checkpoint(region, x) if checkpointed else region(x)

        module = nn.Module()
        module.layer = layer
        module.forward = whole  # type: ignore[method-assign]
        return torch.func.functional_call(module, {f"layer.{n}": p for n, p in other.items()}, (x,)).sum()

    ours = torch.autograd.grad(loss(True), list(other.values()))
    plain = torch.autograd.grad(loss(False), list(other.values()))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert layer.weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode() -> None:
    """Tangents go through a region."""
    x, tangent = torch.randn(4), torch.randn(4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        ours = torch.autograd.forward_ad.unpack_dual(scrimp.checkpoint(chain, dual)).tangent
        plain = torch.autograd.forward_ad.unpack_dual(chain(dual)).tangent
    assert torch.equal(ours, plain)


def test_vmap_inside_a_region() -> None:
    """A vectorised map is recorded as the operators on whole batches that it becomes."""
    x = torch.randn(3, 4, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return torch.func.vmap(chain)(x).exp()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, x).sum(), x)
    (plain,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, plain)


def test_vmap_over_backward() -> None:
    """``is_grads_batched`` runs backward under vmap; replays are not part of that."""
    x = torch.randn(4, requires_grad=True)
    y = scrimp.checkpoint(lambda x: nn.functional.dropout(chain(x), 0.5).exp(), x)
    rows = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True, retain_graph=True)[0]
    for i in range(4):
        (row,) = torch.autograd.grad(y[i], x, retain_graph=True)
        assert torch.equal(rows[i], row)


def test_function_transforms_refuse() -> None:
    """``torch.func.grad`` cannot work with saved-tensor hooks, and says so."""
    with pytest.raises(SessionError, match=r"torch\.func"):
        torch.func.grad(lambda x: scrimp.checkpoint(chain, x).sum())(torch.randn(3))


def test_no_grad_is_a_plain_call() -> None:
    """Without gradients nothing is recorded."""
    with torch.no_grad():
        y = scrimp.checkpoint(chain, torch.ones(3, requires_grad=True))
    assert not y.requires_grad


def test_no_input_requires_grad() -> None:
    """Nothing to differentiate: the plain result, no graph and no values."""
    with scrimp.session(KeepNone()) as session:
        y = chain(torch.ones(3))
    assert not y.requires_grad
    assert session.statistics.made.total == 0


def test_cycles_through_a_mutated_input_are_freed() -> None:
    """An input that is written in the region and so becomes part of its graph is not kept alive by it."""
    data = torch.randn(100)
    storage = weakref.ref(data.untyped_storage())
    w = torch.randn(100, requires_grad=True)
    gc.disable()
    try:
        y = scrimp.checkpoint(lambda d: d.mul_(w).exp().sin(), data)
        del data, y
        assert storage() is None
    finally:
        gc.enable()


def test_accumulation_of_many_steps_is_flat() -> None:
    """Gradient accumulation over one session object holds nothing from step to step."""
    layer = nn.Linear(8, 8)
    session = scrimp.session(KeepNone())
    for _ in range(5):
        with session:
            loss = layer(torch.randn(4, 8)).tanh().sum()
        loss.backward()
        assert session.statistics.made.count == 0
    assert session.statistics.made.total == 10


def test_inference_tensors() -> None:
    """What is made in inference mode counts no versions, and is never taken for replayable."""
    w = torch.randn(3, 3, requires_grad=True)

    def region(w: Tensor) -> Tensor:
        with torch.inference_mode():
            features = torch.ones(4, 3).relu()
        return ((w @ features.clone().T).exp() + torch.ones(3, 4)).sin()

    (ours,) = torch.autograd.grad(scrimp.checkpoint(region, w).sum(), w)
    (plain,) = torch.autograd.grad(region(w).sum(), w)
    assert torch.equal(ours, plain)
