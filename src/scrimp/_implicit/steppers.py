"""Plain, Anderson and Broyden steps, and the rule that chooses between them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .anderson import AndersonHistory, products
from .equation import Equation
from .iterate import Stepper
from .newton import NewtonStepper
from .pace import EVERY, KEEN, REMEMBERED, SHARE, SPAN, WIDE, steps_missing
from .tolerance import euclidean

# Where plain steps shrink the residual by this factor or better, remembering does not pay.
FAST = 0.35
# Where they are slower than this, a long memory pays; in between a brief one does.
SLOW = 0.65
BRIEF = 3
# Anderson, Broyden, Newton.
LAST_STAGE = 3
# On a slow problem the residual is taken to this share of its bound, which costs a step or two.
CAREFUL = 0.4
# An accelerated iteration that leaves this share of its residual after so many steps is stuck.
STUCK, PATIENCE = 0.8, 20
# A stuck residual this near to rounding will not be improved by a better method.
ROUNDING = 100.0


class Damping:
    """A damping factor that is halved for a sample each time it had to retreat."""

    def __init__(self, initial: float) -> None:
        self.factor: float | Tensor = initial

    def along(self, x: Tensor, r: Tensor) -> Tensor:
        """The state x + factor · r."""
        return x + r if isinstance(self.factor, float) and self.factor == 1.0 else x + self.factor * r

    def retreat(self, samples: Tensor, like: Tensor) -> None:
        """Halve the factor of the samples of a mask."""
        factor = like.new_ones(like.shape[0], 1) * self.factor
        self.factor = torch.where(samples.unsqueeze(1), factor / 2, factor)


class PicardStepper:
    """x + damping · r."""

    def __init__(self, damping: float) -> None:
        self._damping = Damping(damping)

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """Go along the residual."""
        return self.polish(x, r), None

    def aim(self, bound: Tensor) -> Tensor:
        """The bound."""
        return bound

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """One step more."""
        return self._damping.along(x, r)

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Damp more."""
        self._damping.retreat(samples, x)

    def given_up(self) -> Tensor | None:
        """Never."""
        return None


class AndersonStepper:
    """Anderson acceleration with a history of ``depth`` differences.

    Only every so many steps are combined, those between are plain. They are remembered all the same: as long as they
    contract, what is combined in the end spans the same space, and hardly more steps are needed.
    """

    def __init__(self, like: Tensor, depth: int, damping: float, every: int = 1) -> None:
        self.history = AndersonHistory(like, depth)
        self._damping = Damping(damping)
        self._every, self._taken = every, 0
        self._before: Tensor | None = None

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """Combine the last steps, or leave that to the next one."""
        if self._before is not None and bool((norm > self._before).any()):
            self._every = 1
        self._before = None
        self._taken += 1
        if (self._taken - 1) % self._every == 0:
            return self.polish(x, r), None
        self._before = norm
        self.history.note(x, r)
        return self._damping.along(x, r), None

    def aim(self, bound: Tensor) -> Tensor:
        """The bound."""
        return bound

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """One step more."""
        self.history.note(x, r)
        return self.history.combine(x, r, self._damping.factor)

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Begin again from x, damped more."""
        self._every = 1
        self._damping.retreat(samples, x)
        self.history.forget(samples, x, r)

    def given_up(self) -> Tensor | None:
        """Never."""
        return None


class BroydenStepper:
    """Broyden's first method; the inverse Jacobian is −1 plus the last ``depth`` rank-one corrections."""

    def __init__(self, like: Tensor, depth: int) -> None:
        samples, columns = like.shape
        self._depth = depth
        self._pushed = 0
        self._left = like.new_zeros(samples, depth, columns)
        self._right = like.new_zeros(samples, depth, columns)
        self._last: tuple[Tensor, Tensor] | None = None

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take in the last step, then go to where the model of the residual is zero."""
        return self.polish(x, r), None

    def aim(self, bound: Tensor) -> Tensor:
        """The bound."""
        return bound

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """One step more."""
        if self._last is not None:
            self._push(x - self._last[0], r - self._last[1])
        self._last = (x, r)
        return x - self._inverse(self._left, self._right, r)

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Begin again from x with the plain inverse."""
        for buffer in (self._left, self._right):
            buffer.masked_fill_(samples.view(-1, 1, 1), 0)
        if self._last is not None:
            rows = samples.unsqueeze(1)
            self._last = (torch.where(rows, x, self._last[0]), torch.where(rows, r, self._last[1]))

    def given_up(self) -> Tensor | None:
        """Never."""
        return None

    def _inverse(self, left: Tensor, right: Tensor, vector: Tensor) -> Tensor:
        used = min(self._pushed, self._depth)
        if not used:
            return -vector
        weights = products(vector, right[:, :used])
        return torch.bmm(weights, left[:, :used]).squeeze(1) - vector

    def _push(self, dx: Tensor, dr: Tensor) -> None:
        image = self._inverse(self._left, self._right, dr)
        pulled = self._inverse(self._right, self._left, dx)
        along = (dx * image).sum(1, keepdim=True)
        tiny = torch.finfo(dx.dtype).eps * (euclidean(dx) * euclidean(image)).unsqueeze(1)
        scale = torch.where(along.abs() > tiny, 1 / along, 0)
        slot = self._pushed % self._depth
        self._pushed += 1
        self._left[:, slot] = ((dx - image) * scale).nan_to_num(0.0, 0.0, 0.0)
        self._right[:, slot] = pulled.nan_to_num(0.0, 0.0, 0.0)


class AutoStepper:
    """Plain steps while they are fast; then Anderson's; where those are stuck, Broyden's, and last Newton's.

    How much Anderson remembers depends on how slow the plain steps were: a memory of three costs little
    and pays
    almost always, a long one pays on slow problems. Broyden's method is slower than Anderson's but survives
    strong non-linearity, Newton's is slower still and needs no luck near a solution.
    """

    def __init__(self, equation: Equation, like: Tensor, depth: int) -> None:
        self._equation, self._like, self._depth = equation, like, depth
        self._recent: list[tuple[Tensor, Tensor]] = []
        self._norms: list[Tensor] = []
        self._worst: list[float] = []
        self._patience, self._wait = REMEMBERED, 0
        self._current: Stepper = PicardStepper(1.0)
        self._stage = 0
        self._slow = False
        self._watch = _Watch()
        self._at_floor: Tensor | None = None

    def step(self, x: Tensor, r: Tensor, norm: Tensor, bound: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take a step of the cheapest method that still makes progress."""
        self._norms = [*self._norms[-2:], norm]
        rate = self._rate(bound)
        self._slow |= rate > SLOW
        if self._stage == 0:
            self._recent = [*self._recent[1 - REMEMBERED :], (x, r)]
            if not self._plain_will_do(r, norm, bound) and rate > FAST:
                self._accelerate(rate)
        elif self._stage < LAST_STAGE:
            if rate > SLOW and isinstance(self._current, AndersonStepper):
                self._current.history.grow(self._depth)
            stuck = self._watch.stuck(norm, bound)
            if bool(stuck.any()):
                rounding = ROUNDING * torch.finfo(x.dtype).eps * torch.maximum(euclidean(x), euclidean(x + r))
                self._at_floor = stuck & (norm <= rounding)
                if bool((stuck & ~self._at_floor).any()):
                    self._escalate()
        return self._current.step(x, r, norm, bound)

    def aim(self, bound: Tensor) -> Tensor:
        """The bound; less on a slow problem, where the error is many times the residual."""
        return CAREFUL * bound if self._slow and self._stage else bound

    def polish(self, x: Tensor, r: Tensor) -> Tensor:
        """One step more of the method in use."""
        return self._current.polish(x, r)

    def retreat(self, samples: Tensor, x: Tensor, r: Tensor) -> None:
        """Accelerate: plain steps that diverge will not do better from the same place."""
        if self._stage == 0:
            self._accelerate(1.0)
        self._current.retreat(samples, x, r)

    def given_up(self) -> Tensor | None:
        """The samples that rounding stopped, and those that Newton's method cannot improve."""
        stalled = self._current.given_up()
        if stalled is None or self._at_floor is None:
            return self._at_floor if stalled is None else stalled
        return stalled | self._at_floor

    def _rate(self, bound: Tensor) -> float:
        """The slowest unsolved sample's factor a step, over the last two; 0 as long as there are no two."""
        if len(self._norms) < 3:
            return 0.0
        before, now = self._norms[0], self._norms[2]
        ratios = torch.where(now > bound, now / before, 0)
        slowest = float(ratios.amax())
        return math.sqrt(slowest if math.isfinite(slowest) else float(ratios.nan_to_num(0.0, 0.0, 0.0).amax()))

    def _plain_will_do(self, r: Tensor, norm: Tensor, bound: Tensor) -> bool:
        """Whether plain steps are likely to be cheaper than accelerated ones."""
        self._worst = [*self._worst[-SPAN:], float((norm / bound).nan_to_num(math.inf).amax())]
        if r.shape[1] < WIDE or not steps_missing(self._worst) < SHARE * r.shape[1]:
            return False
        self._wait -= 1
        if self._wait > 0 or len(self._recent) < REMEMBERED:
            return True
        history = AndersonHistory(self._like, REMEMBERED - 1)
        for state, residual in self._recent:
            history.note(state, residual)
        if float(history.promise(r)[norm > bound].mean()) <= KEEN:
            return False
        # The question costs about as much as a step: it is put again after twice as many.
        self._patience *= 2
        self._wait = self._patience
        return True

    def _accelerate(self, rate: float) -> None:
        depth = min(self._depth, BRIEF) if rate < SLOW else self._depth
        every = EVERY if self._like.shape[1] >= WIDE else 1
        anderson = AndersonStepper(self._like, depth, 1.0, every)
        for x, r in self._recent[:-1]:
            anderson.history.note(x, r)
        self._recent = []
        self._current, self._stage = anderson, 1

    def _escalate(self) -> None:
        self._stage += 1
        # What the old method holds goes before the new one holds as much.
        self._current = PicardStepper(1.0)
        if self._stage < LAST_STAGE:
            self._current = BroydenStepper(self._like, 2 * self._depth)
        else:
            self._current = NewtonStepper(self._equation)


class _Watch:
    """Notices samples whose least residual hardly fell within a number of steps."""

    def __init__(self) -> None:
        self._best: Tensor | None = None
        self._mark: Tensor | None = None
        self._since = 0

    def stuck(self, norm: Tensor, bound: Tensor) -> Tensor:
        """The samples that are stuck now."""
        if self._best is None or self._mark is None:
            self._best = self._mark = norm
        self._best = torch.fmin(self._best, norm)
        self._since += 1
        if self._since < PATIENCE:
            return torch.zeros_like(norm, dtype=torch.bool)
        stuck = (self._best > STUCK * self._mark) & (self._best > bound)
        self._since, self._mark = 0, self._best
        return stuck
