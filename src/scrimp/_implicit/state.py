"""The user's state, any pytree of floating-point tensors, as one matrix with a row for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .checks import need_count

Tree: TypeAlias = Any
"""A tensor, or lists, tuples, dicts and named tuples of tensors, nested."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the state: what it looks like to the user and how many columns it fills."""

    shape: torch.Size
    dtype: torch.dtype
    columns: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a state becomes a matrix of ``samples`` rows and ``columns`` columns, and back.

    Solvers work on the matrix in at least single precision, whatever the user's tensors have; complex numbers
    are pairs of real ones, which is also how autograd sees them.
    """

    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    batch_shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def is_plain(self) -> bool:
        """Whether the state is one tensor of the dtype that solvers work in."""
        return self.structure.is_leaf() and self.leaves[0].dtype == self.dtype

    @property
    def samples(self) -> int:
        """Number of rows."""
        return self.batch_shape.numel()

    @property
    def columns(self) -> int:
        """Number of unknowns of one sample."""
        return sum(leaf.columns for leaf in self.leaves)

    @property
    def coarsest_eps(self) -> float:
        """Relative spacing of numbers in the least precise tensor of the state."""
        return max((torch.finfo(leaf.dtype).eps for leaf in self.leaves), default=0.0)

    def flat(self, tree: Tree, what: str = "f's result") -> Tensor:
        """The matrix of a state; raises if ``tree`` is not built like the state."""
        if isinstance(tree, Tensor) and self._is_own(tree):
            return tree.reshape(self.samples, self.leaves[0].columns)
        tensors, structure = pytree.tree_flatten(tree)
        if structure != self.structure:
            raise TypeError(
                f"{what} must be built like the state: need {self.structure}, have {structure}; "
                "return the same nesting of lists, tuples and dicts"
            )
        for tensor, leaf in zip(tensors, self.leaves, strict=True):
            if not isinstance(tensor, Tensor) or tensor.shape != leaf.shape:
                have = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"{what} must have the shapes of the state: need {tuple(leaf.shape)}, have {have}; "
                    "reshape or broadcast it there"
                )
            if tensor.device != self.device:
                raise ValueError(
                    f"{what} must stay on the state's device: need {self.device}, have {tensor.device}; "
                    "create x0 on the device on which f computes"
                )
        parts = [
            _real(tensor).reshape(self.samples, leaf.columns).to(self.dtype)
            for tensor, leaf in zip(tensors, self.leaves, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def tree(self, flat: Tensor) -> Tree:
        """The state of a matrix, with the user's structure, shapes and dtypes."""
        if self.is_plain:
            return flat.reshape(self.leaves[0].shape)
        parts = torch.split(flat, [leaf.columns for leaf in self.leaves], dim=1)
        tensors = [_shaped(part, leaf) for part, leaf in zip(parts, self.leaves, strict=True)]
        return pytree.tree_unflatten(tensors, self.structure)

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether the tensor is a state of which nothing but the shape need change."""
        alike = tensor.dtype == self.dtype and tensor.shape == self.leaves[0].shape and tensor.device == self.device
        return self.is_plain and alike

    def per_sample(self, values: Tensor) -> Tensor:
        """One number a row, shaped like the batch."""
        return values.reshape(self.batch_shape)


def layout_of(x0: Tree, batch_dims: int) -> Layout:
    """The layout of a state whose first ``batch_dims`` dimensions count independent samples."""
    need_count("batch_dims", batch_dims, 0)
    tensors, structure = pytree.tree_flatten(x0)
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise TypeError("x0 must be a tensor or a pytree of tensors, at least one; wrap numbers in torch.tensor")
    if any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
        have = ", ".join(str(t.dtype) for t in tensors)
        raise TypeError(f"x0 must hold floating-point or complex tensors; have {have}; convert with .float()")
    if len({t.device for t in tensors}) != 1:
        raise ValueError(f"x0 must lie on one device; have {sorted({str(t.device) for t in tensors})}; move it")
    batch_shape = tensors[0].shape[:batch_dims]
    if any(t.dim() < batch_dims or t.shape[:batch_dims] != batch_shape for t in tensors):
        raise ValueError(
            f"every tensor of x0 must begin with the same {batch_dims} batch dimensions (batch_dims); "
            f"have shapes {[tuple(t.shape) for t in tensors]}; batch_dims=0 takes the state as one problem"
        )
    leaves = tuple(Leaf(t.shape, t.dtype, t.shape[batch_dims:].numel() * (2 if t.is_complex() else 1)) for t in tensors)
    double = any(t.dtype in (torch.float64, torch.complex128) for t in tensors)
    dtype = torch.float64 if double else torch.float32
    return Layout(structure, leaves, batch_shape, dtype, tensors[0].device)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _shaped(part: Tensor, leaf: Leaf) -> Tensor:
    if leaf.dtype.is_complex:
        pairs = part.to(leaf.dtype.to_real()).reshape(*leaf.shape, 2)
        return torch.view_as_complex(pairs.contiguous())
    return part.reshape(leaf.shape).to(leaf.dtype)
