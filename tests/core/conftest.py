"""What the exactness suites share."""

import random
from collections.abc import Callable

import pytest

from scrimp.policy import Answer, Candidate, Decision, Policy
from scrimp.store import Store


class RandomPolicy:
    """Drops each value with a probability, the same values again for the same seed."""

    def __init__(self, seed: int, drop: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._drop = drop

    def __call__(self, _value: object) -> Decision:
        """Decide by the next draw."""
        return Decision.DROP if self._random.random() < self._drop else Decision.KEEP


class RandomStorePolicy(Policy):
    """Drops, keeps or stores each value, with equal probability; also what cannot be replayed, and inputs."""

    def __init__(self, seed: int, store: Store) -> None:
        self._random = random.Random(seed)
        self._store = store

    def decide(self, value: Candidate) -> Answer:
        """Decide by the next draw."""
        return self._random.choice([Decision.DROP, Decision.KEEP, self._store])

    def opaque(self, value: Candidate) -> Store | None:
        """Decide by the next draw."""
        return self._random.choice([None, self._store])

    def inputs(self) -> Store | None:
        """Decide by the next draw."""
        return self._random.choice([None, self._store])


@pytest.fixture
def random_store_policy() -> Callable[[int, Store], RandomStorePolicy]:
    """Policies under which any mixture of kept, dropped and stored values can happen."""
    return RandomStorePolicy


@pytest.fixture
def random_policy() -> Callable[..., RandomPolicy]:
    """Policies under which any mixture of kept and dropped values can happen."""
    return RandomPolicy
