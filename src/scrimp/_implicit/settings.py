"""What the user asked for, checked before anything runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..errors import ConvergenceWarning
from .adjoints import Adjoint
from .equation import RowNorm
from .iterate import Progress
from .report import CHOICES, OnFail
from .results import WarmStart
from .tolerance import Tolerance, default_rtol, floor_rtol


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that all four functions share."""

    adjoint: Adjoint
    rtol: float | None
    atol: float | None
    norm: RowNorm
    max_steps: int
    order: int
    on_fail: OnFail
    warm: WarmStart | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.adjoint, Adjoint):
            raise TypeError(f"adjoint must be one of scrimp.adjoints, such as Implicit(); have {self.adjoint!r}")
        if self.on_fail not in CHOICES:
            raise ValueError(f"on_fail must be one of {CHOICES}; have {self.on_fail!r}")
        if self.order < 1:
            raise ValueError(f"order must be at least 1, the order of the highest derivative; have {self.order}")
        if self.max_steps < 0:
            raise ValueError(f"max_steps must not be negative; have {self.max_steps}")
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative; have {value}")

    def tolerance(self, eps: float) -> Tolerance:
        """The tolerance where numbers are ``eps`` apart; warns where the user's cannot be met."""
        if self.rtol is None:
            return Tolerance(default_rtol(eps), self.atol, self.norm)
        floor = floor_rtol(eps)
        if self.rtol < floor and not self.atol and self.on_fail != "ignore":
            warnings.warn(
                f"rtol must be at least {floor:.1e} where numbers are {eps:.1e} apart; have {self.rtol:.1e}; "
                f"going on with {floor:.1e}; for more, compute in a wider dtype",
                ConvergenceWarning,
                stacklevel=4,
            )
        return Tolerance(max(self.rtol, floor), self.atol, self.norm)
