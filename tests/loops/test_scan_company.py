"""``scrimp.scan`` and what else programs are made of: the bits stay those of the plain loop, or it is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import scrimp
from scrimp.errors import LoopError
from scrimp.testing import Step, assert_same_outcome

Scan = Callable[..., Any]
Maker = Callable[[Scan], Step]

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, from forward mode

Pair = namedtuple("Pair", ["a", "b"])


def named_and_reordered_state(scan: Scan) -> Step:
    """Named tuples, None, numbers and dictionaries whose keys come in another order."""
    w = torch.randn(3, requires_grad=True)

    def step(s: Any, _: None) -> Any:
        x, y, n = s.a, s.b["x"][0], s.b["y"]
        return Pair((x * w + y).sin(), {"y": n + 1, "x": [y * w, None]}), {"n": x.sum(), "m": (x * y).sum()}

    def forward() -> Any:
        final, ys = scan(step, Pair(torch.ones(3), {"x": [torch.ones(3), None], "y": 0}), length=9)
        return final.a, final.b["x"][0], ys

    return Step(forward, state=w)


def growing_state(scan: Scan) -> Step:
    """A state that gets larger, and changes its type."""
    w = torch.randn(3, dtype=torch.double, requires_grad=True)

    def step(s: Any, _: None) -> Any:
        h, n = s
        h = torch.cat([h.float() if n % 2 else h.double(), (h[-3:] * w).sin()])
        return (h, n + 1), h.sum().double()

    return Step(lambda: scan(step, (torch.ones(3), 0), length=9), state=w)


def state_made_of_x(scan: Scan) -> Step:
    """A state that is a view of x, outputs that are x, and xs that are closed over too."""
    w, xs = torch.randn(3, requires_grad=True), torch.randn(8, 3, 2, requires_grad=True)

    def step(h: Tensor, x: Tensor) -> Any:
        return x[:, 0], ((h * w * x[:, 1]).sum() + xs[2].sum(), x)

    return Step(lambda: scan(step, torch.ones(3), xs), state=(w, xs))


def in_place_inside(scan: Scan) -> Step:
    """In-place operators on what the step made."""
    w = torch.randn(3, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        y = (h * w).sin_().add_(h)
        rows = torch.zeros(4, 3)
        rows[0], rows[1:3] = y, h * w
        return rows.sum(0).mul_(0.5), rows[1]

    return Step(lambda: scan(step, torch.ones(3), length=9), state=w)


def functional_call_inside(scan: Scan) -> Step:
    """Parameters that are computed, given to a module within the step."""
    model = nn.Linear(3, 3)
    raw = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}

    def forward() -> Any:
        parameters = {name: value * 2 for name, value in raw.items()}
        return scan(
            lambda h, _: (torch.func.functional_call(model, parameters, (h,)).tanh(), h), torch.ones(2, 3), length=9
        )

    return Step(forward, state=raw)


def hooks(scan: Scan) -> Step:
    """Hooks of a parameter, of a tensor with a history, of what the step makes, and after accumulation."""
    model, raw, calls = nn.Linear(3, 3), torch.randn(3, requires_grad=True), torch.zeros(4)

    def count(place: int, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            calls[place] += 1
            return gradient * factor

        return hook

    model.weight.register_hook(count(0, 2.0))
    model.bias.register_post_accumulate_grad_hook(lambda _: calls[1].add_(1) and None)

    def forward() -> Any:
        scale = raw.sin()
        scale.register_hook(count(2, 3.0))

        def step(h: Tensor, _: None) -> Any:
            h = model(h) * scale
            h.register_hook(count(3, 0.5))
            return h.sin(), h.sum()

        return scan(step, torch.ones(2, 3), length=9)

    return Step(forward, state=(model, raw, calls))


def generators_made_and_seeded_inside(scan: Scan) -> Step:
    """Seeds set in the step, a forked default generator, and a generator of the step's own."""
    w = torch.randn(3, requires_grad=True)

    def step(s: Any, _: None) -> Any:
        h, n = s
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(n)
            noise = torch.rand(3)
        own = torch.rand(3, generator=torch.Generator().manual_seed(n))
        return ((h * w + noise * own * torch.rand(3)).sin(), n + 1), None

    return Step(lambda: scan(step, (torch.ones(3), 0), length=9)[0][0], state=w)


def nested_with_noise(scan: Scan) -> Step:
    """A loop in a loop in a loop, with parameters that all steps of the innermost share, dropout and batch norm."""
    w, norm, xs = torch.randn(3, requires_grad=True), nn.BatchNorm1d(3), torch.randn(3, 4, 3, requires_grad=True)
    generator = torch.Generator().manual_seed(3)

    def innermost(h: Tensor, _: None) -> Any:
        return norm(F.dropout((h * w).sin(), 0.3) + torch.rand(h.shape, generator=generator)), None

    def inner(h: Tensor, x: Tensor) -> Any:
        h, _ = scan(innermost, h, length=3)
        return h + x, h.sum()

    return Step(
        lambda: scan(lambda h, x: scan(inner, h, x.expand(2, 4, 3)), torch.ones(4, 3), xs),
        state=(w, norm, xs), generators=[generator],
    )  # fmt: skip


def nested_with_history(scan: Scan) -> Step:
    """A loop in a loop, whose steps use a tensor with a history and one with a hook."""
    raw, hooked = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    hooked.register_hook(lambda gradient: gradient * 2)

    def forward() -> Any:
        scale = raw.sin()

        def outer(h: Tensor, _: None) -> Any:
            return scan(lambda h, _: ((h * scale + hooked).sin(), h), h, length=3)

        return scan(outer, torch.ones(3), length=4)

    return Step(forward, state=(raw, hooked))


def nested_that_returns_what_it_uses(scan: Scan) -> Step:
    """A parameter that only the inner loop uses, and that the step returns as it is: it gets both gradients."""
    w, h = torch.randn(3, requires_grad=True), torch.randn(3)

    def outer(s: Any, _: None) -> Any:
        h, _ = scan(lambda h, _: ((h * w).sin(), None), s[0], length=2)
        return (h, w), None

    return Step(lambda: scan(outer, (h, torch.zeros(3)), length=3)[0], state=w)


def checkpoint_in_the_step(scan: Scan) -> Step:
    """Torch's checkpoint within the step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Tanh(), nn.Linear(3, 3))

    def step(h: Tensor, _: None) -> Any:
        return checkpoint(model, h, use_reentrant=False).sin(), h.sum()

    return Step(lambda: scan(step, torch.ones(2, 3), length=9), state=model)


def checkpoint_around(scan: Scan) -> Step:
    """The loop within torch's checkpoint, of both kinds."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Tanh())
    h = torch.ones(2, 3, requires_grad=True)

    def loop(h: Tensor) -> Any:
        return scan(lambda h, _: (model(h).sin(), None), h.sin(), length=5)[0].sin()

    return Step(
        lambda: checkpoint(loop, checkpoint(lambda h: h.cos(), h, use_reentrant=True), use_reentrant=False),
        state=(model, h),
    )


def reentrant_checkpoint_around(scan: Scan) -> Step:
    """The loop within torch's older checkpoint."""
    model, h = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    def loop(h: Tensor) -> Any:
        return scan(lambda h, _: (F.dropout(model(h)).sin(), None), h.sin(), length=5)[0].sin()

    return Step(lambda: checkpoint(loop, h, use_reentrant=True), state=(model, h))


def saved_on_cpu(scan: Scan) -> Step:
    """Hooks of another's around the loop."""
    model, h = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    def forward() -> Any:
        with torch.autograd.graph.save_on_cpu():
            return scan(lambda h, _: (model(h).sin(), h.sum()), h.sin(), length=9)

    return Step(forward, state=(model, h))


def within_a_scrimp_checkpoint(scan: Scan) -> Step:
    """The loop is one operator of a region whose values are dropped."""
    model, h = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3)), torch.ones(2, 3, requires_grad=True)

    def loop(h: Tensor) -> Any:
        return scan(lambda h, _: (model(h).sin(), None), h.sin(), length=5)[0].sin()

    return Step(lambda: scrimp.checkpoint(loop, h), state=(model, h))


def fixed_point_in_the_step(scan: Scan) -> Step:
    """An implicit step: its value and derivative come from a custom Function, with leaves of its own."""
    w = torch.full((3,), 0.9, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        return scrimp.fixed_point(lambda x: 0.3 * torch.tanh(x * w) + h, h)[0].sin(), None

    return Step(lambda: scan(step, torch.ones(3), length=4), state=w)


def transforms_in_the_step(scan: Scan) -> Step:
    """torch.func within the step."""
    w = torch.randn(3, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        slope = torch.func.vmap(torch.func.grad(lambda q: (q * w).sin().sum()))(h)
        return h - 0.1 * slope, None

    return Step(lambda: scan(step, torch.ones(2, 3), length=6), state=w)


def derivative_by_an_alias(scan: Scan) -> Step:
    """A step that differentiates with respect to an alias of a parameter that it makes for this."""
    w = torch.randn(3, requires_grad=True)

    def step(h: Tensor, _: None) -> Any:
        alias = w.view_as(w)
        (slope,) = torch.autograd.grad((h * alias).sin().sum(), alias, create_graph=True)
        return h - 0.1 * slope, slope.sum()

    return Step(lambda: scan(step, torch.ones(3), length=6), state=w)


def partial_gradients(scan: Scan) -> Step:
    """Several torch.autograd.grad calls over one graph, of some results with respect to some leaves."""
    w, v, h = (torch.randn(3, requires_grad=True) for _ in range(3))

    def backward(results: Any) -> None:
        final, ys = results
        (w.grad,) = torch.autograd.grad(final.sum(), w, retain_graph=True)
        v.grad, h.grad = torch.autograd.grad(ys.sum(), [v, h], retain_graph=True)
        h.grad = h.grad + torch.autograd.grad(ys[3], h)[0]

    return Step(
        lambda: scan(lambda h, _: ((h * w + v).sin(), h.sum()), h, length=9), state=(w, v, h), backward=backward
    )


CASES: list[Maker] = [
    named_and_reordered_state, growing_state, state_made_of_x, in_place_inside, functional_call_inside, hooks,
    generators_made_and_seeded_inside, nested_that_returns_what_it_uses, nested_with_noise, nested_with_history,
    checkpoint_in_the_step,
    checkpoint_around, reentrant_checkpoint_around, saved_on_cpu, within_a_scrimp_checkpoint, fixed_point_in_the_step,
    transforms_in_the_step, derivative_by_an_alias, partial_gradients,
]  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_bits_are_those_of_the_plain_loop(make: Maker, plain: Scan) -> None:
    """Results, gradients, buffers and later draws, of known length, within a budget, and of unknown length."""
    ways: list[dict[str, Any]] = [{"slots": 2}, {"budget": "1 MB"}, {"slots": 2, "until": lambda _: False}]
    assert_same_outcome(
        lambda: make(plain),
        *(lambda way=way: make(lambda *args, **kwargs: scrimp.scan(*args, **kwargs, **way)) for way in ways),
    )


def test_nested_sums_are_exact_for_many_numbers(plain: Scan) -> None:
    """Gradients of what only inner loops use are summed in the order of the plain loops, whatever the numbers are."""

    def run(scan: Scan, seed: int) -> Tensor:
        torch.manual_seed(seed)
        w, h = torch.randn(4, requires_grad=True), torch.randn(4)

        def outer(h: Tensor, _: None) -> Any:
            h, ys = scan(lambda h, _: ((h * w).sin(), h), h, length=4)
            return h + ys.mean(0), ys.sum()

        h, ys = scan(outer, h, length=5)
        (h.sum() + ys.sum()).backward()
        assert w.grad is not None
        return w.grad

    for seed in range(12):
        assert torch.equal(run(plain, seed), run(lambda *a, **k: scrimp.scan(*a, **k, slots=2), seed))


def test_a_compiled_module_runs_eagerly_in_the_loop() -> None:
    """Nothing of ours or of the step is compiled, so that all runs of a step have the same bits."""
    torch.compiler.reset()
    model, xs = nn.Linear(3, 3), torch.randn(6, 2, 3)
    compiled = torch.compile(model, backend="eager")

    def gradient(cell: Any) -> Tensor:
        model.zero_grad()
        scrimp.scan(lambda h, x: ((cell(h) + x).sin(), None), torch.zeros(2, 3), xs, slots=2)[0].sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    assert torch.equal(gradient(compiled), gradient(model))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_of_the_whole_loop_are_refused(transform: Any) -> None:
    """The error says what to do."""

    def loop(h: Tensor) -> Tensor:
        return scrimp.scan(lambda h, _: (h.sin(), None), h, length=3)[0].sum()

    with pytest.raises(LoopError, match="write the loop plainly"):
        transform(loop)(torch.ones(2, 3) if transform is torch.func.vmap else torch.ones(3))


def test_forward_mode_is_refused() -> None:
    """Tangents would be lost without a word."""
    with forward_ad.dual_level(), pytest.raises(LoopError, match="forward-mode"):
        scrimp.scan(lambda h, _: (h.sin(), None), forward_ad.make_dual(torch.ones(3), torch.ones(3)), length=3)


def test_transforms_without_gradients_are_fine(plain: Scan) -> None:
    """Under no_grad it is a plain loop, for vmap and for tangents."""
    w, hs = torch.randn(3), torch.rand(4, 3)

    def loop(scan: Scan) -> Callable[[Tensor], Tensor]:
        return lambda h: scan(lambda h, _: ((h * w).sin(), h), h, length=5)[0]

    with torch.no_grad():
        assert torch.equal(torch.func.vmap(loop(scrimp.scan))(hs), torch.func.vmap(loop(plain))(hs))
        ours = torch.func.jvp(loop(scrimp.scan), (hs[0],), (w,))
        assert all(map(torch.equal, ours, torch.func.jvp(loop(plain), (hs[0],), (w,))))
