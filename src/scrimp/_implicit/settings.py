"""What the user asked for, checked before anything runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from ..errors import ConvergenceWarning
from .adjoints import Adjoint
from .checks import need_count
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
        need_count("order, that of the highest derivative,", self.order, 1)
        need_count("max_steps", self.max_steps, 0)
        if not callable(self.norm):
            raise TypeError(f"norm must give the norms of a matrix's rows; have {self.norm!r}")
        if self.warm is not None and not isinstance(self.warm, WarmStart):
            raise TypeError(f"warm must be a scrimp.solvers.WarmStart(), made once; have {self.warm!r}")
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number; have {value!r}")
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
