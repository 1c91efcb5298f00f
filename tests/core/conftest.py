"""What the exactness suites share."""

import random
from collections.abc import Callable

import pytest

from scrimp.policy import Decision


class RandomPolicy:
    """Drops each value with a probability, the same values again for the same seed."""

    def __init__(self, seed: int, drop: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._drop = drop

    def __call__(self, _value: object) -> Decision:
        """Decide by the next draw."""
        return Decision.DROP if self._random.random() < self._drop else Decision.KEEP


@pytest.fixture
def random_policy() -> Callable[..., RandomPolicy]:
    """Policies under which any mixture of kept and dropped values can happen."""
    return RandomPolicy
