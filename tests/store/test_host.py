"""Values in host memory: exact, once per storage, gone when nobody needs them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from scrimp.errors import BudgetError, PolicyError, SavedChangedError
from scrimp.policy import DROP, KEEP, Candidate, KeepNone, StoreAll, StoreInputs, StoreLargerThan, StoreOps
from scrimp.store import Host
from scrimp.testing import Step, assert_same_step, live_bytes

aten = torch.ops.aten
SIZE = 64 * 64 * 4


def leaf() -> Tensor:
    """A leaf of ``SIZE`` bytes."""
    return torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()


def chain(x: Tensor) -> Tensor:
    """Operators that save their results: four values of the size of ``x``."""
    return x.exp().tanh().sigmoid().sqrt().sum()


def gradient(x: Tensor) -> Tensor:
    """The gradient that a leaf has by now."""
    assert x.grad is not None
    return x.grad


def plain_gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a function of a leaf, without scrimp."""
    x = leaf()
    f(x).backward()
    return gradient(x)


class Mixer(nn.Module):
    """A bit of everything: views, masks, in-place operators, statistics, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        """Gated, normalised, residual."""
        a, b = self.up(x).chunk(2, dim=-1)
        h = self.down(F.dropout(F.silu(a) * b, 0.3))
        return x + F.relu(self.norm(h), inplace=True).clamp(max=1.0)


def mixer_step() -> Step:
    """Two of them."""
    model, x = nn.Sequential(Mixer(), Mixer()), torch.randn(8, 16, requires_grad=True)
    return Step(lambda: model(x).square().mean(), state=(model, x))


def odd_ones(store: Host) -> Callable[[Candidate], Any]:
    """A plain callable that keeps, drops and stores in turn."""
    return lambda value: (KEEP, DROP, store)[value.index % 3]


POLICIES: dict[str, Callable[[Host], Any]] = {
    "all": StoreAll,
    "operators": lambda host: StoreOps({aten.addmm, aten.native_dropout.default}, host),
    "large": lambda host: StoreLargerThan(600, host),
    "callable": odd_ones,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_step_is_exact(policy: Callable[[Host], Any], inside: bool) -> None:
    """Every bit of a step is that of the plain one, and nothing is left in the store."""
    host = Host()
    assert_same_step(mixer_step, lambda: scrimp.session(policy(host)), backward_inside=inside)
    assert host.statistics.held.total > 0
    assert host.statistics.held.bytes == 0


def test_device_memory_goes_and_comes_back() -> None:
    """After forward the device holds nothing; in backward, no more than one value at a time and the gradients."""
    x, host = leaf(), Host()
    with live_bytes() as count, scrimp.session(StoreAll(host)) as session:
        y = chain(x)
        assert count.now == y.element_size()
        assert session.statistics.kept.bytes == 0
        assert session.statistics.stored.bytes == 4 * SIZE
        before = count.peak
        y.backward()
    assert before <= 2 * SIZE + 4
    assert count.peak <= 3 * SIZE + 8
    assert torch.equal(gradient(x), plain_gradient(chain))


def test_statistics() -> None:
    """Bytes each way, the copies there are, and the time they took."""
    x, host = leaf(), Host()
    with scrimp.session(StoreAll(host)) as session:
        y = chain(x)
    assert (host.statistics.held.count, host.statistics.held.bytes) == (4, 4 * SIZE)
    assert (host.statistics.bytes_out, host.statistics.bytes_in) == (4 * SIZE, 0)
    assert host.statistics.in_bandwidth == 0
    y.backward()
    after = host.statistics
    assert (after.held.count, after.held.bytes, after.held.peak_bytes, after.held.total) == (0, 0, 4 * SIZE, 4)
    assert (after.bytes_out, after.bytes_in) == (4 * SIZE, 4 * SIZE)
    assert min(after.out_bandwidth, after.in_bandwidth, after.waited_seconds) > 0
    assert (session.statistics.stored.bytes, session.statistics.stored.total) == (0, 4)


def test_a_storage_moves_once() -> None:
    """Views, slices, broadcasts and transposes of one storage are one value, which is copied once and whole."""

    def step(x: Tensor) -> Tensor:
        y = x.exp()
        wide = y[:1].expand(64, 64)
        return (y.t() * x + y[:, ::2].repeat(1, 2) * y.view(-1).view(64, 64)).sum() + (wide * x).sin().sum()

    x, host = leaf(), Host()
    with scrimp.session(StoreOps({aten.exp}, host)):
        loss = step(x)
    assert (host.statistics.held.total, host.statistics.bytes_out) == (1, SIZE)
    loss.backward()
    assert host.statistics.bytes_in == SIZE
    assert torch.equal(gradient(x), plain_gradient(step))


def test_parameters_and_inputs_stay() -> None:
    """What was there before the session is not copied: its memory would not be freed."""
    host, layer, x = Host(), nn.Linear(8, 8), torch.randn(4, 8)
    with scrimp.session(StoreAll(host)):
        layer(x).sum().backward()
    assert host.statistics.bytes_out == 0


def test_what_cannot_be_replayed_is_stored() -> None:
    """What a Function of the user's own saves can go elsewhere, although it can never be dropped."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            square = x * x
            ctx.save_for_backward(x, square)
            return square * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _, square = ctx.saved_tensors
            return grads[0] * square * 3

    x, host = leaf(), Host()
    with scrimp.session(StoreAll(host)) as session:
        loss = Cube.apply(x * 2).sum()
    assert (session.statistics.kept.bytes, session.statistics.stored.bytes) == (0, 2 * SIZE)
    loss.backward()
    assert torch.equal(gradient(x), plain_gradient(lambda x: Cube.apply(x * 2).sum()))


def test_a_replay_starts_from_what_is_stored() -> None:
    """Dropped values are replayed from stored ones, which are fetched for it."""
    x, host = leaf(), Host()
    with scrimp.session(StoreOps({aten.exp}, host)) as session:
        loss = x.exp().tanh().sigmoid().sum()
    assert (session.statistics.kept.bytes, session.statistics.stored.count) == (0, 1)
    loss.backward()
    assert session.statistics.replayed_operators == 2
    assert torch.equal(gradient(x), plain_gradient(lambda x: x.exp().tanh().sigmoid().sum()))


def test_inputs_of_regions() -> None:
    """Regions one after the other: each input is stored, everything inside is dropped, and the last one is computed."""

    def step(x: Tensor) -> Tensor:
        for _ in range(3):
            x = scrimp.checkpoint(lambda x: x.sin().exp() * 0.5, x * 1, policy=policy)
        return x.sum()

    host = Host()
    policy: Any = StoreInputs(host)
    x = leaf()
    with live_bytes() as count:
        loss = step(x)
        assert count.now == 4
    assert host.statistics.held.bytes == 3 * SIZE
    loss.backward()
    assert host.statistics.held.bytes == 0
    policy = KeepNone()
    assert torch.equal(gradient(x), plain_gradient(step))


def test_inputs_that_nobody_else_holds() -> None:
    """An input whose storage dies while its region runs leaves the store when its graph goes, needed or not."""
    host = Host()

    def region(inputs: list[Tensor]) -> Tensor:
        y = inputs[0] + inputs[1].exp()
        inputs.clear()
        return y.sin()

    x = leaf()
    loss = scrimp.checkpoint(region, [x * 2, x * 3], policy=StoreInputs(Host(window=1))).sum()
    loss.backward()
    loss = scrimp.checkpoint(region, [x * 2, x * 3], policy=StoreInputs(host)).sum()
    assert host.statistics.held.total == 2
    del loss
    assert host.statistics.held.bytes == 0


def test_inputs_of_regions_inside_a_session() -> None:
    """What a region reads, and what it returns, is decided by the session around it, which may store it."""
    x, host = leaf(), Host()
    with scrimp.session(StoreAll(host)) as session:
        y = x * 2
        loss = scrimp.checkpoint(lambda y: y.sin().exp(), y).sum()
        del y
    assert (session.statistics.kept.bytes, session.statistics.stored.bytes) == (0, 2 * SIZE)
    loss.backward()
    assert torch.equal(gradient(x), plain_gradient(lambda x: (x * 2).sin().exp().sum()))


def test_writes_after_it_left_do_no_harm() -> None:
    """A value that was stored is what it was, whatever happens to its storage afterwards."""
    x, host = leaf(), Host()
    with scrimp.session(StoreAll(host)):
        y = x.exp()
        loss = y.sum()
        y.detach().zero_()
    with torch.no_grad():
        y.add_(1)
    loss.backward()
    assert torch.equal(gradient(x), plain_gradient(lambda x: x.exp().sum()))


def test_a_write_before_it_left_is_found() -> None:
    """What was written behind the session's back is not sent anywhere, and backward refuses it as always."""
    x, host = leaf(), Host()
    with scrimp.session(lambda value: KEEP) as session:
        y = x.exp()
        session.policy = StoreAll(host)
        z = y * y
    y.detach().zero_()
    with pytest.raises(SavedChangedError):
        z.sum().backward()


def test_backward_again() -> None:
    """With ``retain_graph`` values are fetched in each pass, and go back to where they were in between."""
    x, host = leaf(), Host()
    with live_bytes() as count, scrimp.session(StoreAll(host)) as session:
        loss = chain(x)
    seen = []
    for _ in range(3):
        x.grad = None
        loss.backward(retain_graph=True)
        seen.append((count.now, session.statistics.kept.bytes, host.statistics.held.bytes))
        assert torch.equal(gradient(x), plain_gradient(chain))
    assert len(set(seen)) == 1
    assert seen[0][1:] == (0, 4 * SIZE)
    del loss
    assert host.statistics.held.bytes == 0


def test_double_backward() -> None:
    """The gradient of a gradient, with both graphs under the session."""

    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(chain(x), x, create_graph=True)
        (result,) = torch.autograd.grad(first.square().sum(), x)
        return result

    host = Host()
    with scrimp.session(StoreAll(host)):
        ours = second(leaf())
    assert torch.equal(ours, second(leaf()))
    assert host.statistics.held.bytes == 0


def test_backward_never_run() -> None:
    """A graph that is thrown away takes its copies along."""
    host = Host()
    with scrimp.session(StoreAll(host)):
        loss = chain(leaf())
    assert host.statistics.held.bytes == 4 * SIZE
    del loss
    assert host.statistics.held.bytes == 0


def test_an_exception_in_forward() -> None:
    """Leaving a session by an exception leaves nothing behind, and the store goes on working."""
    x, host = leaf(), Host()
    with pytest.raises(ZeroDivisionError), scrimp.session(StoreAll(host)):
        chain(x).mul(1 / 0)
    assert host.statistics.held.bytes == 0
    test_statistics()


def test_an_exception_in_backward() -> None:
    """A pass that fails half-way leaves the store as it was."""
    x, host = leaf(), Host()
    with scrimp.session(StoreAll(host)):
        y = x.exp()
        y.register_hook(lambda grad: 1 / 0)
        loss = y.tanh().sigmoid().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del y, loss
    assert host.statistics.held.bytes == 0


def test_a_full_store() -> None:
    """What has no room is dropped if it can be replayed; the limit holds."""
    x, host = leaf(), Host(2 * SIZE)
    with scrimp.session(StoreAll(host)) as session:
        loss = chain(x)
    assert host.statistics.held.peak_bytes == 2 * SIZE
    assert (session.statistics.stored.count, session.statistics.dropped.count) == (2, 2)
    assert session.statistics.kept.bytes == 0
    loss.backward()
    assert torch.equal(gradient(x), plain_gradient(chain))


def test_two_graphs_in_one_store() -> None:
    """Graphs that are alive at once, and walked in any order, do not get in each other's way."""
    host, leaves = Host(), [leaf(), leaf()]
    losses = []
    for x in leaves:
        with scrimp.session(StoreAll(host)):
            losses.append(chain(x))
    for loss in losses:
        loss.backward()
    for x in leaves:
        assert torch.equal(gradient(x), plain_gradient(chain))
    losses.clear()
    assert host.statistics.held.bytes == 0


def test_disabled_session() -> None:
    """A session that is switched off stores nothing."""
    host = Host()
    session = scrimp.session(StoreAll(host))
    session.enabled = False
    with session:
        chain(leaf()).backward()
    assert host.statistics.held.total == 0


def test_empty_values() -> None:
    """A tensor without elements has nothing to be copied."""
    x, host = torch.empty(0, 3, requires_grad=True), Host()
    with scrimp.session(StoreAll(host)):
        loss = x.exp().sum()
    loss.backward()
    assert gradient(x).shape == (0, 3)
    assert host.statistics.held.total == 0


def test_what_a_policy_must_answer() -> None:
    """Neither a store's class nor anything else will do."""
    with pytest.raises(PolicyError, match="KEEP"), scrimp.session(lambda value: Host):  # type: ignore[arg-type,return-value]
        chain(leaf())


def test_a_limit_must_be_bytes() -> None:
    """Limits are read as budgets are."""
    assert Host("2 kB").limit == 2000
    with pytest.raises(BudgetError, match="lots"):
        Host("lots")
