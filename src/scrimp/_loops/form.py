"""How a pytree is built, and taking one apart: quickly where it is a single leaf or a tuple of leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from scrimp.errors import LoopError

Tree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
"""The leaves of a pytree: tensors, and constants between them."""

CONSTANTS = (type(None), bool, int, float, complex, str)
LEAF_TYPES = frozenset({Tensor, Parameter, *CONSTANTS})
"""Types of which instances are leaves for sure; there are more."""


@final
@dataclass(frozen=True, slots=True)
class Form:
    """How a pytree is built."""

    spec: pytree.TreeSpec
    is_leaf: bool
    length: int
    """Of a tuple of leaves; 0 for anything else."""

    @classmethod
    def of(cls, tree: Tree) -> tuple[Leaves, Form]:
        """Return the leaves of a tree, and how it is built."""
        leaves, spec = pytree.tree_flatten(tree)
        is_flat = type(tree) is tuple and len(tree) == len(leaves) and all(map(pytree.tree_is_leaf, tree))
        return leaves, cls(spec, pytree.tree_is_leaf(tree), len(leaves) if is_flat else 0)

    def tree(self, leaves: Sequence[Any]) -> Tree:
        """Return the tree that has these leaves."""
        if self.is_leaf:
            return leaves[0]
        return tuple(leaves) if self.length else pytree.tree_unflatten(leaves, self.spec)

    def leaves(self, tree: Tree, what: str) -> Leaves:
        """Return the leaves of a tree that must be built like this; dictionaries may have their keys in any order."""
        if self.is_leaf and type(tree) in LEAF_TYPES:
            return [tree]
        if self.length and type(tree) is tuple and len(tree) == self.length:
            leaves = [leaf for leaf in tree if type(leaf) in LEAF_TYPES]
            if len(leaves) == self.length:
                return leaves
        leaves, found = pytree.tree_flatten(tree)
        if found != self.spec:
            try:
                leaves = self.spec.flatten_up_to(tree)
            except ValueError:
                leaves = [tree]
            if len(leaves) != self.spec.num_leaves or not all(map(pytree.tree_is_leaf, leaves)):
                raise LoopError(f"step must return {what}: need {self.spec}, have {found}")
        return leaves
