"""Everything that scrimp raises.

::

    ScrimpError
    ├── SessionError          a session or region used in a way it cannot work
    ├── PolicyError           a policy that is malformed, or that answered with something else than a Decision
    └── BackwardError         a gradient that cannot be computed exactly
        ├── SavedChangedError     a tensor that backward needs was modified in place after it was saved
        ├── SourceChangedError    a tensor that a replay starts from was modified after it was read
        └── ReplayMismatchError   a replay did not reproduce the bits of the forward pass (``verify=True``)
"""


class ScrimpError(Exception):
    """Base of every error that scrimp raises."""


class SessionError(ScrimpError, RuntimeError):
    """A session or a region is used in a way in which it cannot work."""


class PolicyError(ScrimpError, TypeError):
    """A policy is malformed, or answered with something else than a Decision."""


class BackwardError(ScrimpError, RuntimeError):
    """A gradient cannot be computed exactly, so it is not computed at all."""


class SavedChangedError(BackwardError):
    """A tensor that backward needs was modified in place after autograd saved it.

    Plain PyTorch raises a ``RuntimeError`` in the same place.
    """


class SourceChangedError(BackwardError):
    """A tensor that a replay starts from was modified after the forward pass read it."""


class ReplayMismatchError(BackwardError):
    """A replay did not reproduce the bits that the forward pass computed."""


def saved_changed(what: str) -> str:
    """Return the message of a :class:`SavedChangedError`; it begins as PyTorch's own does."""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        "saved for backward. Use the out-of-place operator, or modify it after backward"
    )
