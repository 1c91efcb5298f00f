"""Everything that scrimp raises, and the warnings that it gives.

::

    ScrimpError
    ├── SessionError              a session or region used in a way in which it cannot work
    ├── PolicyError               a policy that is malformed, or that answered with something else than a Decision
    ├── BudgetError               a budget that cannot be met, or not be read
    ├── TraceError                a trace that contradicts itself
    ├── PlanError                 a plan that does not fit its trace
    ├── StoreError                a store that cannot be used, or has lost what was given to it
    ├── BackwardError             a backward pass that cannot start, or not finish with the right gradients
    │   ├── SavedChangedError         a tensor that backward needs was modified in place after it was saved
    │   ├── SourceChangedError        a tensor that a replay starts from was modified after it was read
    │   ├── ReplayMismatchError       a replay did not reproduce the bits of the forward pass (``verify=True``)
    │   ├── GradientMismatchError     a gradient that does not fit what it is the gradient of
    │   ├── GraphFreedError           a graph that an earlier pass freed
    │   ├── LateGradientError         a gradient for a leaf that had been reported as ready
    │   └── BackwardCancelledError    a pass that was cancelled between two nodes
    ├── BranchError               branches for ``parallel`` that are not independent
    ├── LoopError                 a step of ``scan`` that does what cannot be repeated
    ├── ChainError                a chain of hand-written layers used in a way in which it cannot work
    │   ├── UnknownLayerError         a layer that is not in the chain
    │   ├── LayerOrderError           a layer that is in the chain, but not where it is needed
    │   └── MissingInputError         an input that is not kept, and cannot be computed from one that is
    ├── ConvergenceError          a fixed point, root, minimum or adjoint that was not found
    ├── OrderError                a derivative of higher order than the result was prepared for
    ├── AdjointError              an adjoint that cannot give a trustworthy gradient
    └── MissingExtraError         an optional package that is not installed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ScrimpError(Exception):
    """Base of every error that scrimp raises."""


class SessionError(ScrimpError, RuntimeError):
    """A session or a region is used in a way in which it cannot work."""


class PolicyError(ScrimpError, TypeError):
    """A policy is malformed, or answered with something else than a Decision."""


class BudgetError(ScrimpError, RuntimeError):
    """Nothing that was found meets the budget, or the budget itself cannot be read.

    Attributes:
        smallest: the smallest budget, in bytes, that is known to work; ``None`` where there is none to name.
    """

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class TraceError(ScrimpError):
    """A trace contradicts itself, or a file does not hold one."""


class TraceWarning(UserWarning):
    """A trace that was made without data had to guess at something."""


class PlanError(ScrimpError):
    """A plan does not fit its trace, or a file does not hold one."""


class StoreError(ScrimpError, RuntimeError):
    """A store cannot be used, or has lost what was given to it."""


class BackwardError(ScrimpError, RuntimeError):
    """A backward pass cannot start, or cannot finish with the right gradients."""


class SavedChangedError(BackwardError):
    """A tensor that backward needs was modified in place after autograd saved it.

    Plain PyTorch raises a ``RuntimeError`` in the same place.
    """


class SourceChangedError(BackwardError):
    """A tensor that a replay starts from was modified after the forward pass read it."""


class ReplayMismatchError(BackwardError):
    """A replay did not reproduce the bits that the forward pass computed."""


class GradientMismatchError(BackwardError):
    """A gradient does not fit what it is the gradient of: its number, shape, dtype or device."""


class GraphFreedError(BackwardError):
    """The graph was freed by an earlier backward pass."""


class LateGradientError(BackwardError):
    """A gradient arrived for a leaf that had already been reported as ready."""


class BackwardCancelledError(BackwardError):
    """A backward pass was cancelled between two nodes.

    Attributes:
        nodes_done: How many nodes had run.
        leaves_done: The leaves whose ``.grad`` holds the whole gradient of this pass; no other was touched.
    """

    def __init__(self, message: str, *, nodes_done: int = 0, leaves_done: tuple[Tensor, ...] = ()) -> None:
        super().__init__(message)
        self.nodes_done = nodes_done
        self.leaves_done = leaves_done


class BranchError(ScrimpError, RuntimeError):
    """Branches given to ``scrimp.parallel`` are not independent of each other, or of the rest of the step."""


class LoopError(ScrimpError, RuntimeError):
    """A step given to ``scrimp.scan`` does what cannot be repeated, or did something else when it was repeated."""


class ChainError(ScrimpError, RuntimeError):
    """A :class:`scrimp.ManualChain` is used in a way in which it cannot work."""


class UnknownLayerError(ChainError):
    """The chain has no such layer: it was not run forward, or was run backward already."""


class LayerOrderError(ChainError):
    """The chain has this layer, but it is not its turn."""


class MissingInputError(ChainError):
    """The input of a layer is not kept, and no input from which it could be computed is."""


class ConvergenceError(ScrimpError):
    """A fixed point, a root, a minimum or its adjoint was not found, and the caller asked for an error."""


class OrderError(ScrimpError):
    """A derivative of higher order was asked for than the result was prepared for."""


class AdjointError(ScrimpError):
    """The chosen adjoint cannot give a trustworthy gradient for this problem."""


class MissingExtraError(ScrimpError, ImportError):
    """A part of scrimp needs an optional package that is not installed."""


class ConvergenceWarning(UserWarning):
    """The equation was not solved to its tolerance: the result, and so its gradient, may be wrong."""


class GradientWarning(UserWarning):
    """The adjoint equation was not solved well enough: the gradient may be wrong."""


class StackableBranchesWarning(UserWarning):
    """Branches of one shape would run faster as one batched operator than in threads."""


class StoreWarning(UserWarning):
    """A store has lost something, or takes nothing more; what it should have held is computed again, or kept."""


def saved_changed(what: str) -> str:
    """Return the message of a :class:`SavedChangedError`; it begins as PyTorch's own does."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        "saved for backward. Use the out-of-place operator, or modify it after backward"
    )
