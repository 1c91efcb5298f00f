"""ManualChain against a model: any sequence of calls leaves the account that the model says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scrimp import ManualChain
from scrimp.errors import BudgetError, LayerOrderError, MissingInputError, UnknownLayerError
from scrimp.policy import DROP, KEEP


class ChainMachine(RuleBasedStateMachine):
    """The model: layers in order, their true inputs, which are kept, and which input follows from which layer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, bool] = {}
        self.chain = ManualChain(lambda layer: KEEP if self.answers[layer.layer_id] else DROP)
        self.layers: list[int] = []
        self.inputs: dict[int, np.ndarray] = {}
        self.before: dict[int, int | None] = {}
        self.output: tuple[int, np.ndarray] | None = None
        self.next = 0

    def forward_fn(self, layer: int):
        """A layer that changes the size."""
        return lambda x: np.resize(x * 1.25 + layer, 1 + layer % 3)

    @rule(keep=st.booleans(), follow=st.booleans(), size=st.integers(1, 4))
    def forward(self, keep: bool, follow: bool, size: int) -> None:
        """Run a layer, of the last output or of something new."""
        layer, self.next = self.next, self.next + 1
        follows = follow and self.output is not None
        x = self.output[1] if follows and self.output else np.full(size, float(layer))
        before = self.output[0] if follows and self.output and self.output[0] in self.layers else None
        if before is None and self.unevictable() + x.nbytes > (self.chain.budget or 1 << 30):
            with pytest.raises(BudgetError):
                self.chain.forward(layer, x, self.forward_fn(layer))
            return
        self.answers[layer] = keep
        kept = self.kept()
        y = self.chain.forward(layer, x, self.forward_fn(layer))
        self.layers.append(layer)
        self.inputs[layer], self.before[layer], self.output = x, before, (layer, y)
        if before is None or (keep and self.chain.budget is None):
            assert self.chain.has(layer)
        if before is not None and not keep:
            assert not self.chain.has(layer)
        self.none_went_in_vain(kept)

    @precondition(lambda self: self.layers)
    @rule()
    def backward(self) -> None:
        """Run the last layer; its input is the true one."""
        layer = self.layers[-1]
        seen = []
        grad = np.array([1.0])

        def call():
            return self.chain.backward(layer, grad, self.forward_fn(layer), lambda x, g: seen.append(x) or g)

        if self.comes_back(layer) or self.chain.has(layer):
            assert call() is grad
            assert np.array_equal(seen[0], self.inputs[layer])
            self.forget(layer)
        else:
            with pytest.raises(MissingInputError):
                call()

    @precondition(lambda self: len(self.layers) > 1)
    @rule(data=st.data())
    def backward_out_of_order(self, data: st.DataObject) -> None:
        """Any other layer is refused."""
        layer = data.draw(st.sampled_from(self.layers[:-1]))
        with pytest.raises(LayerOrderError):
            self.chain.backward(layer, None, lambda x: x, lambda x, g: g)

    @rule()
    def unknown(self) -> None:
        """A layer that never was is refused."""
        with pytest.raises(UnknownLayerError):
            self.chain.remove(self.next)

    @precondition(lambda self: self.layers)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Take any layer out."""
        layer = data.draw(st.sampled_from(self.layers))
        self.chain.remove(layer)
        self.forget(layer)

    @rule(share=st.none() | st.floats(0.0, 1.0))
    def set_budget(self, share: float | None) -> None:
        """Any budget that can be met."""
        if share is None:
            self.chain.budget = None
            return
        low, high = max(self.unevictable(), 1), sum(self.inputs[one].nbytes for one in self.layers) + 64
        kept = self.kept()
        self.chain.budget = int(low + share * (high - low))
        self.none_went_in_vain(kept)

    @rule()
    def clear(self) -> None:
        """Take all out."""
        self.chain.clear()
        for layer in list(self.layers):
            self.forget(layer)
        self.output = None

    def kept(self) -> set[int]:
        """Layers whose inputs are kept."""
        return {one for one in self.layers if self.chain.has(one)}

    def none_went_in_vain(self, before: set[int]) -> None:
        """No input was let go of that there is room for."""
        gone = before - self.kept()
        assert not gone or self.chain.budget is not None
        for one in gone:
            assert self.chain.memory_usage + self.inputs[one].nbytes > self.chain.budget

    def forget(self, layer: int) -> None:
        """Take a layer out of the model."""
        self.layers.remove(layer)
        for one in self.layers:
            if self.before[one] == layer:
                self.before[one] = None

    def comes_back(self, layer: int) -> bool:
        """Whether its input can be computed from another."""
        before = self.before[layer]
        return before is not None and (self.chain.has(before) or self.comes_back(before))

    def unevictable(self) -> int:
        """Bytes that no budget can do without."""
        kept = [one for one in self.layers if self.chain.has(one)]
        return sum(self.inputs[one].nbytes for one in kept if not self.comes_back(one))

    @invariant()
    def account_is_exact(self) -> None:
        """Bytes and counts are those of the model."""
        kept = [one for one in self.layers if self.chain.has(one)]
        statistics = self.chain.statistics()
        assert self.chain.memory_usage == statistics.kept.bytes == sum(self.inputs[one].nbytes for one in kept)
        assert statistics.kept.count == len(kept)
        assert statistics.dropped.count == len(self.layers) - len(kept)
        assert statistics.made.bytes == sum(self.inputs[one].nbytes for one in self.layers)
        assert len(self.chain) == len(self.layers)
        assert all(one in self.chain for one in self.layers)

    @invariant()
    def budget_holds(self) -> None:
        """The chain is never over its budget."""
        assert self.chain.budget is None or self.chain.memory_usage <= self.chain.budget


TestChain = ChainMachine.TestCase
TestChain.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
