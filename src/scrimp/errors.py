"""The errors and warnings that scrimp raises."""


class ScrimpError(Exception):
    """Base of every error that scrimp raises."""


class ConvergenceError(ScrimpError):
    """A fixed point, a root, a minimum or its adjoint was not found, and the caller asked for an error."""


class OrderError(ScrimpError):
    """A derivative of higher order was asked for than the result was prepared for."""


class AdjointError(ScrimpError):
    """The chosen adjoint cannot give a trustworthy gradient for this problem."""


class ConvergenceWarning(UserWarning):
    """The equation was not solved to its tolerance: the result, and so its gradient, may be wrong."""


class GradientWarning(UserWarning):
    """The adjoint equation was not solved well enough: the gradient may be wrong."""


class MissingExtraError(ScrimpError, ImportError):
    """A part of scrimp needs an optional package that is not installed."""
