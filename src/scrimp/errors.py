"""Every error that scrimp raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class ScrimpError(Exception):
    """Base of every error that scrimp raises."""


class BackwardError(ScrimpError, RuntimeError):
    """A backward pass cannot start, or could not finish."""


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


class StackableBranchesWarning(UserWarning):
    """Branches of one shape would run faster as one batched operator than in threads."""


class BranchError(ScrimpError, RuntimeError):
    """Branches given to ``scrimp.parallel`` are not independent of each other, or of the rest of the step."""
