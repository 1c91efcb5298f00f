"""What is written after it was read: in place, through views, behind autograd's back."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import SavedChangedError, SourceChangedError
from scrimp.policy import KeepNone


def gradients(step: Callable[[Tensor], Tensor], checkpointed: bool) -> tuple[Tensor, Tensor]:
    """Run a step on fixed data, and return its result and the gradient of its input."""
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6).requires_grad_()
    y = scrimp.checkpoint(step, x) if checkpointed else step(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def assert_same_gradients(step: Callable[[Tensor], Tensor]) -> None:
    """Fail unless a checkpointed step gives the bits of the plain one."""
    for plain, ours in zip(gradients(step, False), gradients(step, True), strict=True):
        assert torch.equal(plain, ours)


def test_the_comparison_can_fail() -> None:
    """A step that gives something else the second time is caught."""
    calls = iter((1.0, 2.0))
    with pytest.raises(AssertionError):
        assert_same_gradients(lambda x: x.sin() * next(calls))


def test_in_place_on_an_intermediate() -> None:
    """The old version is replayed from the operators that made it, although its storage was overwritten."""
    assert_same_gradients(lambda x: ((x * 2).add_(1).neg_().exp_() * x.sin()).cos())


def test_in_place_through_a_view() -> None:
    """Writing to a slice makes a new version of the whole storage."""

    def step(x: Tensor) -> Tensor:
        y = x * 3
        y[1:3].mul_(y[0:2].detach().sin())
        y.t()[2].add_(1.5)
        return (y.exp() * y).tanh()

    assert_same_gradients(step)


def test_a_view_taken_before_the_write_sees_it() -> None:
    """A view and its base share one value, whichever was written."""

    def step(x: Tensor) -> Tensor:
        y = x * 3
        view = y.view(-1)[::2]
        y.add_(1)
        return view.sigmoid() * view.exp()

    assert_same_gradients(step)


def test_overwriting_what_a_dropped_value_needs() -> None:
    """The source of a dropped value is copied before a later operator of the session destroys it."""
    source = torch.randn(4, 6, dtype=torch.float64)

    def step(x: Tensor) -> Tensor:
        buffer = source.clone().requires_grad_(False)
        y = (x * 2 + buffer).exp()
        buffer.zero_()
        return y * (x + buffer).sin()

    assert_same_gradients(step)


def test_out_argument_is_overwritten() -> None:
    """``out=`` makes a new version of the buffer it fills, each time."""

    def step(x: Tensor) -> Tensor:
        buffer = torch.empty(4, 6, dtype=torch.float64)
        with torch.no_grad():
            torch.mul(x, 2, out=buffer)
        first = (x + buffer).exp()
        with torch.no_grad():
            torch.mul(x, 5, out=buffer)
        return first * (x + buffer).sin()

    assert_same_gradients(step)


@pytest.mark.parametrize("where", ["positional", "keyword", "nested", "closure", "parameter"])
def test_a_source_mutated_after_forward_raises(where: str) -> None:
    """A tensor that the replay starts from was changed: no gradient, but an error that names operator and tensor."""
    x = torch.randn(3, requires_grad=True)
    other = torch.randn(3)
    weight = nn.Parameter(torch.randn(3))

    def region(x: Tensor, *arguments: Tensor, scale: Tensor | None = None, nest: dict[str, list[Tensor]] | None = None):
        extra = {"positional": arguments[0] if arguments else None, "keyword": scale, "closure": other}.get(where)
        if nest is not None:
            extra = nest["a"][0]
        if where == "parameter":
            extra = weight
        assert extra is not None
        return (x + extra).exp().sin()

    match where:
        case "positional":
            y = scrimp.checkpoint(region, x, other)
        case "keyword":
            y = scrimp.checkpoint(region, x, scale=other)
        case "nested":
            y = scrimp.checkpoint(region, x, nest={"a": [other]})
        case _:
            y = scrimp.checkpoint(region, x)
    with torch.no_grad():
        (weight if where == "parameter" else other).add_(1)
    with pytest.raises(SourceChangedError, match=r"aten\.add\.Tensor on a float32\[3\] tensor"):
        y.sum().backward()


def test_a_saved_tensor_mutated_after_forward_raises() -> None:
    """What autograd itself saved was changed: the error that plain PyTorch gives, as an error of ours."""
    x = torch.randn(3, requires_grad=True)
    y = scrimp.checkpoint(lambda x: x.sin().exp(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises((SavedChangedError, SourceChangedError)):
        y.sum().backward()


@pytest.mark.parametrize("policy", [scrimp.policy.KeepAll(), KeepNone(), scrimp.policy.EveryN(2)])
def test_a_kept_value_mutated_after_forward_raises(policy: scrimp.policy.Policy) -> None:
    """The user changes a result that backward needs: with any policy that is an error, as without scrimp."""
    x = torch.randn(3, requires_grad=True)
    with scrimp.session(policy):
        y = x.exp()
    z = y.sum()
    with torch.no_grad():
        y.add_(1)
    if isinstance(policy, KeepNone):
        z.backward()  # the dropped value does not live in the storage that was written
        assert torch.equal(x.grad, x.exp())
        return
    with pytest.raises(SavedChangedError, match="modified by an inplace operation"):
        z.backward()


def test_a_saved_value_overwritten_inside_the_session() -> None:
    """A kept value refuses, as plain autograd does; a dropped one is replayed as it was when it was saved."""
    for policy in (KeepNone(), scrimp.policy.EveryN(1)):
        x = torch.randn(3, requires_grad=True)
        with scrimp.session(policy):
            y = x.exp()
            z = y.sin()
            with torch.no_grad():
                y.add_(1)
        if isinstance(policy, KeepNone):
            z.sum().backward()
            assert torch.equal(x.grad, x.exp().cos() * x.exp())
        else:
            with pytest.raises(SavedChangedError, match="modified by an inplace operation"):
                z.sum().backward()


def test_chunks_that_count_versions_on_their_own() -> None:
    """``unsafe_split`` gives views with separate version counters, and gated recurrent cells write to them in turn."""

    def step(x: Tensor) -> Tensor:
        first, second, third = torch.unsafe_chunk(x * 2, 3, 1)
        first.sigmoid_()
        second.add_(first.detach()).sigmoid_()
        kept = third.clone().exp()
        third.mul_(second)
        return torch.cat([first * second, third.tanh() * kept], 1).exp()

    assert_same_gradients(step)


def test_a_storage_resized_after_forward_raises() -> None:
    """Memory taken away under a source, as sharded training does, is noticed."""
    x = torch.randn(3, requires_grad=True)
    shard = torch.randn(3)
    y = scrimp.checkpoint(lambda x: (x * shard).exp(), x)
    shard.untyped_storage().resize_(0)
    with pytest.raises((SavedChangedError, SourceChangedError)):
        y.sum().backward()


def test_verify_notices_what_no_version_counter_shows() -> None:
    """A source changed through NumPy is found by comparing bits."""
    x = torch.randn(3, requires_grad=True)
    other = torch.randn(3)
    with scrimp.session(KeepNone(), verify=True):
        y = (x + other).exp()
    other.numpy()[0] += 1
    with pytest.raises(scrimp.errors.ReplayMismatchError, match=r"aten\.exp\.default"):
        y.sum().backward()


def test_optimizer_step_between_forward_and_backward_raises() -> None:
    """The parameters that a replay reads are watched, whether or not autograd saved them itself."""
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = scrimp.checkpoint(lambda x: layer(x).relu().sum(), torch.randn(2, 3))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    with pytest.raises(SourceChangedError, match="modified since"):
        loss.backward()


def test_a_step_inside_the_session_copies_what_replays_still_need() -> None:
    """Two losses share a parameter that is stepped between their backwards, all in one session."""

    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        bias = nn.Parameter(torch.randn(3))
        x = torch.randn(3, requires_grad=True)
        with scrimp.session(KeepNone() if checkpointed else scrimp.policy.KeepAll()):
            first, second = (x + bias).exp().sum(), (x * 2 + bias).sin().exp().sum()
            first.backward()
            with torch.no_grad():
                bias.sub_(bias.grad)
            second.backward()
        return [x.grad, bias.grad, bias.detach()]

    for plain, ours in zip(run(False), run(True), strict=True):
        assert torch.equal(plain, ours)


def test_geometry_changed_in_place() -> None:
    """``t_``, ``unsqueeze_`` and friends change how a tensor object looks at its storage, not the value."""

    def step(x: Tensor) -> Tensor:
        y = x * 2
        z = y.exp()
        y.t_().unsqueeze_(0)
        return (y.sin() * y).sum(0).t() * z

    assert_same_gradients(step)


def test_geometry_changed_in_place_after_a_replay_source_was_noted() -> None:
    """Such a change counts as a write for autograd; to a replay it is none."""

    def step(x: Tensor) -> Tensor:
        y = torch.full((4, 6), 2.0, dtype=torch.float64)
        first = (x + y).exp()
        y.transpose_(0, 1)
        return (first * y.t()).sin()

    assert_same_gradients(step)


def test_storage_swapped_or_resized() -> None:
    """``set_`` and ``resize_`` put other memory under a tensor object."""

    def step(x: Tensor) -> Tensor:
        y = (x * 2).detach()
        z = (x + y).exp()
        y.resize_(2, 6)
        y.copy_(torch.ones(2, 6))
        swapped = torch.zeros(2, 6, dtype=torch.float64)
        swapped.set_(y)
        return z * (x[:2] + swapped).sin().repeat(2, 1)

    assert_same_gradients(step)


def test_other_memory_under_a_tensor_object() -> None:
    """Assigning to ``data`` moves no version counter; a replay must not start from what the object shows now."""

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            first, second = torch.full((4, 6), 2.0, dtype=torch.float64), torch.full((4, 6), 3.0, dtype=torch.float64)
        y = x + first
        first.data = second
        return y.exp() * first

    assert_same_gradients(step)


def test_another_geometry_under_a_tensor_object() -> None:
    """Assigning a transposed view of its own memory to ``data`` changes what later operators read."""

    def step(x: Tensor) -> Tensor:
        y = (x[:, :4] * 2).clone()
        y.data = y.data.t()
        return y.exp().sin().cumsum(0)

    assert_same_gradients(step)


@pytest.mark.parametrize("policy", [KeepNone(), scrimp.policy.EveryN(2), scrimp.policy.EveryN(1)])
@pytest.mark.parametrize("needed_by_a_replay", [False, True])
def test_a_write_that_autograd_does_not_notice(policy: scrimp.policy.Policy, needed_by_a_replay: bool) -> None:
    """Through ``data``, what autograd saved can be overwritten; it then uses the new content, and so do we."""

    def run(policy: scrimp.policy.Policy) -> Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        with scrimp.session(policy):
            with torch.no_grad():
                saved = torch.full((5,), 2.0)
            y = x.exp() * saved
            z = y.sin() if needed_by_a_replay else y
            saved.data.mul_(3)
            y.data.add_(1)
        z.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(scrimp.policy.KeepAll()), run(policy))


def test_one_storage_under_two_tensor_objects() -> None:
    """``set_`` makes two objects share memory, but not the version counter."""

    def step(x: Tensor) -> Tensor:
        first, second = torch.full((4, 6), 2.0, dtype=torch.float64), torch.full((4, 6), 3.0, dtype=torch.float64)
        y = (x + first).sin()
        first.set_(second)
        z = (y * first).exp()
        second.mul_(2)
        return z + (x + second).cos()

    assert_same_gradients(step)


def test_out_argument_that_is_read_as_well() -> None:
    """``torch.add(a, 1, out=a)`` overwrites its result, and reads it first."""

    def step(x: Tensor) -> Tensor:
        buffer = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.add(buffer, 1, out=buffer)
        y = x + buffer
        torch.sin(buffer, out=buffer[:])
        return y.exp() * (x + buffer).cos()

    assert_same_gradients(step)


@pytest.mark.parametrize("policy", [KeepNone(), scrimp.policy.EveryN(2)])
@pytest.mark.parametrize("needed_before", [False, True])
def test_memory_filled_through_numpy(policy: scrimp.policy.Policy, needed_before: bool) -> None:
    """A result that the forward pass shares with a NumPy array, and changes through it, is not computed again."""

    def run(policy: scrimp.policy.Policy) -> Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        with scrimp.session(policy):
            y = x.detach().sin()
            z = (x * y).exp() if needed_before else x
            y.numpy()[2:] = 3
            loss = ((x + y).cos() * z).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    assert torch.equal(run(scrimp.policy.KeepAll()), run(policy))
