"""One step of a loop: its arguments as leaves of a graph of its own, and what it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from scrimp._geometry import is_plain
from scrimp._loops.form import CONSTANTS, LEAF_TYPES, Form, Leaves, Tree
from scrimp._loops.outside import Snapshot
from scrimp._loops.patience import Patience
from scrimp.errors import LoopError, SourceChangedError


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
        bare: Leaves = []
        wants, versions = [], []
        for leaf in leaves:
            wanted, version = False, 0
            if isinstance(leaf, Tensor):
                wanted, version = leaf.requires_grad, leaf._version
                known = apart.get(id(leaf))
                if known is None:
                    known = apart[id(leaf)] = leaf.detach()
                leaf = known
            bare.append(leaf)
            wants.append(wanted)
            versions.append(version)
        return cls(bare, tuple(wants), tuple(versions))

    def arguments(self) -> Leaves:
        """Return what a step is given of this state: fresh leaves for a graph of its own."""
        made: dict[int, Tensor] = {}
        given: Leaves = []
        for leaf, want in zip(self.leaves, self.wants, strict=True):
            if isinstance(leaf, Tensor):
                known = made.get(id(leaf))
                if known is None:
                    known = made[id(leaf)] = leaf.detach().requires_grad_(want)
                leaf = known
            given.append(leaf)
        return given

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
    state_form: Form
    x_form: Form | None
    output_form: Form | None = None

    def tree(self, leaves: Sequence[Any]) -> Tree:
        """Return the state that has these leaves."""
        return self.state_form.tree(leaves)

    def run(self, arguments: Leaves, x: Leaves, patience: Patience) -> Ran:
        """Run the step on the leaves of a state and of x."""
        state = self.tree(arguments)
        returned = patience.call(self.function, state, None if self.x_form is None else self.x_form.tree(x))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise LoopError(
                f"step must return two things, the new state and an output (or None); it returned {_kind(returned)}"
            )
        following = self.state_form.leaves(returned[0], "a state that is built like the one it takes")
        check_leaves(following, "the state")
        if self.output_form is None:
            output, self.output_form = Form.of(returned[1])
        else:
            output = self.output_form.leaves(returned[1], "outputs that are built alike")
        for leaf in output:
            if not (leaf is None or isinstance(leaf, Tensor)):
                raise LoopError(
                    "outputs of a step must be tensors or None, since they are stacked; use torch.as_tensor"
                )
        return Ran(arguments, x, following, output)


def check_leaves(leaves: Sequence[Any], what: str) -> None:
    """Raise if there is something that cannot be carried from step to step."""
    for leaf in leaves:
        if type(leaf) not in LEAF_TYPES and not isinstance(leaf, (Tensor, *CONSTANTS)):
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
