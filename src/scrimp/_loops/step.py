"""One step of a loop: its arguments as leaves of a graph of its own, and what it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.utils import _pytree as pytree

from scrimp._geometry import is_plain
from scrimp._loops.outside import Snapshot
from scrimp.errors import LoopError, SourceChangedError

Tree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
"""The leaves of a pytree: tensors, and constants between them."""

_CONSTANTS = (type(None), bool, int, float, complex, str)


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """The state before a step, with nothing that autograd made."""

    leaves: Leaves
    wants: tuple[bool, ...]
    """Which of them required grad in the loop."""
    versions: tuple[int, ...]
    snapshot: Snapshot | None = None
    nbytes: int = 0

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Frame:
        """Detach the leaves; what was one tensor in two places stays one."""
        apart: dict[int, Tensor] = {}
        bare = [apart.setdefault(id(leaf), leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        wants = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        return cls(bare, wants, tuple(leaf._version if isinstance(leaf, Tensor) else 0 for leaf in bare))

    def arguments(self) -> Leaves:
        """Return what a step is given of this state: fresh leaves for a graph of its own."""
        made: dict[int, Tensor] = {}
        for leaf, want in zip(self.leaves, self.wants, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in made:
                made[id(leaf)] = leaf.detach().requires_grad_(want)
        return [made[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def check_unchanged(self) -> None:
        """Raise if somebody wrote to a tensor of this state."""
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise SourceChangedError(
                    f"backward needs a state of the loop that was kept, and its tensor of shape {list(leaf.shape)} has "
                    "been modified since. Run backward first, or clone() what the loop returned before writing to it"
                )


@final
@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran, with its graph."""

    arguments: Leaves
    """What it was given for its state: leaves of the graph."""
    x: Leaves
    state: Leaves
    output: Leaves

    def tensors(self) -> list[Tensor]:
        """Return all tensors that it returned."""
        return [leaf for leaf in (*self.state, *self.output) if isinstance(leaf, Tensor)]


@final
@dataclass(slots=True)
class Step:
    """The user's function, and how its arguments and results are built."""

    function: Callable[[Tree, Tree], tuple[Tree, Tree]]
    state_spec: pytree.TreeSpec
    x_spec: pytree.TreeSpec | None
    output_spec: pytree.TreeSpec | None = None

    def tree(self, leaves: Sequence[Any]) -> Tree:
        """Return the state that has these leaves."""
        return pytree.tree_unflatten(leaves, self.state_spec)

    def run(self, arguments: Leaves, x: Leaves) -> Ran:
        """Run the step on the leaves of a state and of x."""
        state = self.tree(arguments)
        given = pytree.tree_unflatten(x, self.x_spec) if self.x_spec is not None else None
        returned = self.function(state, given)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise LoopError(
                f"step must return two things, the new state and an output (or None); it returned {_kind(returned)}"
            )
        following = _leaves_of(returned[0], self.state_spec, "a state that is built like the one it takes")
        check_leaves(following, "the state")
        if self.output_spec is None:
            output, self.output_spec = pytree.tree_flatten(returned[1])
        else:
            output = _leaves_of(returned[1], self.output_spec, "outputs that are built alike")
        for leaf in output:
            if not (leaf is None or isinstance(leaf, Tensor)):
                raise LoopError(
                    "outputs of a step must be tensors or None, since they are stacked; use torch.as_tensor"
                )
        return Ran(arguments, x, following, output)


def _leaves_of(tree: Tree, spec: pytree.TreeSpec, what: str) -> Leaves:
    """Return the leaves of a tree that must be built like another; dictionaries may have their keys in any order."""
    if isinstance(tree, Tensor) and spec.is_leaf():
        return [tree]
    leaves, found = pytree.tree_flatten(tree)
    if found != spec:
        try:
            leaves = spec.flatten_up_to(tree)
        except ValueError:
            leaves = [tree]
        if not all(pytree.tree_is_leaf(leaf) for leaf in leaves):
            raise LoopError(f"step must return {what}: need {spec}, have {found}")
    return leaves


def check_leaves(leaves: Sequence[Any], what: str) -> None:
    """Raise if there is something that cannot be carried from step to step."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise LoopError(f"{what} must hold tensors, numbers, strings or None; it holds {_kind(leaf)}")


def slice_of(xs: Sequence[Tensor], step: int) -> Leaves:
    """Return the part of ``xs`` that a step gets, as leaves of the step's graph."""
    return [one.detach()[step].requires_grad_(one.requires_grad) for one in xs]


def addresses(leaves: Sequence[Any]) -> dict[int, int]:
    """Return the memory that leaves have: bytes by address."""
    memories = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor) and is_plain(leaf)]
    return {memory._cdata: memory.nbytes() for memory in memories}


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}" if thing is not None else "None"
