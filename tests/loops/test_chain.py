"""ManualChain: exact gradients, exact accounts, and errors that say what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import scrimp
from scrimp import ManualChain
from scrimp.errors import (
    BudgetError,
    ChainError,
    LayerOrderError,
    MissingInputError,
    PolicyError,
    ScrimpError,
    UnknownLayerError,
)
from scrimp.policy import DROP, KEEP, Decision, EveryN, KeepAll, KeepNone, KeepOps, Online, Selective

from .layers import plain, run, square_backward, square_forward


def drop_everything(candidate) -> Decision:
    """A policy as a callable; named, so that every worker collects the test under one name."""
    return DROP


@pytest.mark.parametrize(
    "policy",
    [None, KeepAll(), KeepNone(), EveryN(5), Selective(1e9), Online(120), Online(120, "oldest"), drop_everything],
    ids=lambda policy: getattr(policy, "__name__", str(policy)),
)
@pytest.mark.parametrize("budget", [None, 40, 130, "1kB"])
def test_gradients_are_bit_identical(policy, budget) -> None:
    """Whatever is kept, the gradient has the bits of the one with everything kept, and nothing is left."""
    chain = ManualChain(policy, budget)
    assert np.array_equal(run(chain), plain())
    assert chain.memory_usage == len(chain) == 0
    if chain.budget is not None:
        assert chain.statistics().kept.peak_bytes <= chain.budget


def test_a_layer_is_computed_again_from_the_nearest_kept_input() -> None:
    """EveryN(4) runs three layers again for each group of four, and keeps their inputs once they are there."""
    chain = ManualChain(EveryN(4))
    run(chain)
    assert chain.statistics().replayed_operators == 9


def test_inputs_on_the_way_are_retained_at_the_best_places() -> None:
    """With room for few inputs the steps run are those of Revolve: 105 to reverse 50 from 7 kept ones."""
    chain = ManualChain(KeepNone(), 7 * 40)
    run(chain, 50)
    # All is dropped on the way forward, which Revolve would not do, so that the way down is run once more.
    assert chain.statistics().replayed_operators == 105


def test_cheapest_goes_first() -> None:
    """Over the budget, the input that costs the least time a byte goes."""
    chain = ManualChain(budget=3 * 8)
    x = np.ones(1)
    for layer, cost in enumerate([1.0, 100.0, 1.0]):
        x = chain.forward(layer, x, square_forward, cost)
    chain.forward(3, x, square_forward, 1.0)
    assert [chain.has(layer) for layer in range(4)] == [True, False, True, True]


def test_no_input_goes_in_vain() -> None:
    """What went first stays after all where a larger input that goes later makes room enough."""
    chain = ManualChain()
    x = np.ones(1)
    for layer, (size, cost) in enumerate([(1, 1.0), (4, 9.0), (2, 1.0), (2, 1.0)]):
        x = chain.forward(layer, x, lambda x, size=size: np.resize(x, size), cost)
    # Inputs of 8, 8, 32 and 16 bytes, of which the second is the cheapest; letting the third go is enough.
    chain.budget = 32
    assert [chain.has(layer) for layer in range(4)] == [True, True, False, True]


def test_a_new_input_that_is_worth_least_costs_no_other() -> None:
    """It is not kept, and nothing is let go of for it."""
    chain = ManualChain(budget=40)
    x = np.ones(1)
    for layer, (size, cost) in enumerate([(1, 9.0), (1, 9.0), (3, 0.0)]):
        x = chain.forward(layer, x, lambda x, size=size: np.resize(x, size), cost)
    chain.forward(3, x, square_forward, 1.0)
    assert [chain.has(layer) for layer in range(4)] == [True, True, True, False]


def test_oldest_goes_first() -> None:
    """Online(evict="oldest") lets go in the order of making, but never of what cannot be computed again."""
    chain = ManualChain(Online(3 * 8, "oldest"))
    x = np.ones(1)
    for layer in range(5):
        x = chain.forward(layer, x, square_forward)
    assert [chain.has(layer) for layer in range(5)] == [True, False, False, True, True]


def test_a_smaller_budget_evicts_at_once() -> None:
    """The budget can change while there are layers, and counts from then on; too small a one is refused."""
    chain = ManualChain()
    x = np.ones(1)
    for layer in range(5):
        x = chain.forward(layer, x, square_forward)
    chain.budget = 20
    assert chain.memory_usage == 16
    with pytest.raises(BudgetError) as caught:
        chain.budget = 7
    assert (caught.value.smallest, chain.budget) == (8, 20)


def test_a_budget_without_room_for_the_first_input() -> None:
    """It is refused before the layer runs."""
    with pytest.raises(BudgetError, match="raise it"):
        ManualChain(budget=7).forward(0, np.ones(1), lambda x: pytest.fail("ran"))


def test_while_disabled_the_policy_is_not_asked() -> None:
    """Everything is kept then."""
    chain = ManualChain(KeepNone())
    x = chain.forward(0, np.ones(1), square_forward)
    chain.enabled = False
    x = chain.forward(1, x, square_forward)
    chain.enabled = True
    chain.forward(2, x, square_forward)
    assert [chain.has(layer) for layer in range(3)] == [True, True, False]


def test_another_input_begins_a_new_chain() -> None:
    """An input that is not the very output of the layer before cannot be computed again, so it is kept."""
    chain = ManualChain(KeepNone())
    y = chain.forward("a", np.ones(1), square_forward)
    chain.forward("b", y + 1, square_forward)
    assert chain.has("a")
    assert chain.has("b")


def test_layers_run_backward_from_the_last() -> None:
    """Another order is an error that says whose turn it is, and changes nothing."""
    chain = ManualChain()
    chain.forward(1, chain.forward(0, np.ones(1), square_forward), square_forward)
    with pytest.raises(LayerOrderError, match="turn of 1, have 0"):
        chain.backward(0, np.ones(1), square_forward, square_backward)
    assert len(chain) == 2


def test_a_layer_is_in_the_chain_once() -> None:
    """A second forward of the same name is an error."""
    chain = ManualChain()
    chain.forward(0, np.ones(1), square_forward)
    with pytest.raises(LayerOrderError, match="already"):
        chain.forward(0, np.ones(1), square_forward)


def test_an_unknown_layer() -> None:
    """Backward and remove say which layers there are."""
    chain = ManualChain()
    chain.forward("known", np.ones(1), square_forward)
    for call in (lambda: chain.remove("x"), lambda: chain.backward("x", None, square_forward, square_backward)):
        with pytest.raises(UnknownLayerError, match="'known'"):
            call()


def test_a_missing_input_is_an_error_never_a_placeholder() -> None:
    """When the layer is gone from which an input would be computed, backward says so."""
    chain = ManualChain(KeepNone())
    x = np.ones(1)
    for layer in range(3):
        x = chain.forward(layer, x, square_forward)
    chain.remove(1)
    with pytest.raises(MissingInputError, match="layer 2"):
        chain.backward(2, np.ones(1), square_forward, square_backward)


def test_errors_of_the_layers_change_nothing() -> None:
    """A forward that fails adds no layer; a backward that fails can be run again."""
    chain = ManualChain(KeepNone())
    x = chain.forward(1, chain.forward(0, np.ones(1), square_forward), square_forward)
    with pytest.raises(ZeroDivisionError):
        chain.forward(2, x, lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain.backward(1, x, square_forward, lambda x, grad: 1 / 0)
    assert len(chain) == 2
    assert chain.memory_usage == 8
    chain.backward(1, x, square_forward, square_backward)
    assert 1 not in chain


def test_what_cannot_be_used_is_refused() -> None:
    """Inputs without a size, and policies that are none or look at operators."""
    with pytest.raises(ChainError, match="nbytes"):
        ManualChain().forward(0, [1.0], square_forward)
    with pytest.raises(PolicyError):
        ManualChain("everything")  # type: ignore[arg-type]
    for policy in (KeepOps([]), lambda layer: True):
        chain = ManualChain(policy)  # type: ignore[arg-type]
        x = chain.forward(0, np.ones(1), square_forward)
        with pytest.raises(PolicyError):
            chain.forward(1, x, square_forward)
    assert issubclass(ChainError, ScrimpError)


def test_sizes_costs_and_stores_that_make_no_sense() -> None:
    """Errors that say what is needed, before the layer runs."""

    class Negative:
        nbytes = -1

    with pytest.raises(ChainError, match="have Negative"):
        ManualChain().forward(0, Negative(), lambda x: pytest.fail("ran"))
    for cost in (-1.0, float("nan")):
        with pytest.raises(ChainError, match="0 seconds or more"):
            ManualChain().forward(0, np.ones(1), lambda x: pytest.fail("ran"), cost)
    with pytest.raises(ChainError, match=r"scrimp\.store\.Host"):
        ManualChain(store="/tmp")  # type: ignore[arg-type]


def test_threads_share_a_chain() -> None:
    """Layers from many threads, and readers beside them: the account is that of one thread after another."""
    chain = ManualChain(lambda layer: KEEP if layer.index % 2 else DROP, budget=4000)
    readings = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            readings.append((chain.memory_usage, chain.statistics().kept.bytes, chain.has((0, 0))))

    def write(thread: int) -> None:
        for layer in range(50):
            chain.forward((thread, layer), np.ones(2), square_forward)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    reader.start()
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    stop.set()
    reader.join()
    assert len(chain) == 200
    assert chain.memory_usage == 3200
    assert max(kept for _, kept, _ in readings) <= 4000
    chain.clear()
    assert chain.memory_usage == len(chain) == chain.statistics().made.bytes == 0


def test_the_account_can_be_read_while_a_layer_runs() -> None:
    """A long layer does not hold up those who look."""
    chain = ManualChain()
    seen = []

    def slow(x):
        thread = threading.Thread(target=lambda: seen.append((chain.memory_usage, chain.has(0), len(chain))))
        thread.start()
        thread.join(10)
        return x + 1

    chain.forward(0, np.ones(1), slow)
    assert seen == [(0, False, 0)]


def test_the_wave_example_agrees_with_finite_differences() -> None:
    """examples/wave_adjoint.py finds the gradient."""
    path = Path(__file__).parents[2] / "examples" / "wave_adjoint.py"
    spec = importlib.util.spec_from_file_location("wave_adjoint", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wave_adjoint"] = module
    try:
        spec.loader.exec_module(module)
        assert module.main(size=20, steps=80, budget="40kB") < 1e-6
    finally:
        del sys.modules["wave_adjoint"]


PROGRAM = """
import sys, types
package = types.ModuleType("scrimp")
package.__path__ = [sys.argv[1]]
sys.modules["scrimp"] = package
import scrimp._chain, scrimp._loops.schedule
sys.exit(any(name == "torch" or name.startswith("torch.") for name in sys.modules))
"""


def test_no_torch() -> None:
    """A fresh interpreter that imports the chain and the schedules has no torch afterwards."""
    assert scrimp.__file__ is not None
    subprocess.run([sys.executable, "-c", PROGRAM, str(Path(scrimp.__file__).parent)], check=True)
