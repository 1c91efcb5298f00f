"""The proven optimum of a trace and a budget, by CP-SAT: what scrimp's own solvers are judged by.

    python benchmarks/optimum.py [--seconds 120] [--budgets 6] [NAME ...]

The model says what scrimp's simulator does with plans of ``Keep()`` and ``Drop()``, replay by replay and operator by
operator, in exact bytes. Without names, all of :data:`STEPS` are planned, each followed on the machine of
:func:`scrimp.trace_on`, so that the numbers are the same everywhere. Needs ``ortools``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from ortools.sat.python import cp_model
from torch import Tensor, nn
from torch.nn import functional as F

import scrimp
from architectures import ResNet, UNet
from blocks import GPTBlock, LlamaBlock
from scrimp._index import Index, index
from scrimp._plan import Drop, Keep
from scrimp._simulate import fixed_values, hold_ends, simulate_index
from scrimp._solve._planner import Planner
from scrimp._trace import Trace, Unpack

__all__ = ["STEPS", "Optimum", "optimum", "trace_of"]

_UNITS = 10_000_000  # of the step's time: the objective counts in whole ones
Literal = cp_model.IntVar | bool  # a variable, or a constant


@dataclass(frozen=True, slots=True)
class Optimum:
    """What CP-SAT found.

    Attributes:
        seconds: of the fastest plan found; infinite without one.
        bound: no plan of keeps and single drops is faster.
        decisions: that plan's.
        proven: whether the two are the same, or whether it is proven that there is no plan.
    """

    seconds: float
    bound: float
    decisions: Mapping[int, Keep | Drop]
    proven: bool


def optimum(
    trace: Trace, budget: int, limit: float = 60.0, hint: Mapping[int, object] | None = None, workers: int = 2
) -> Optimum:
    """Find the fastest plan of keeps and single drops within a budget, and prove it if there is time.

    Args:
        trace: the step.
        budget: bytes.
        limit: seconds to search.
        hint: decisions of a plan to start from.
        workers: threads.
    """
    return _Model(index(trace), budget).solved(limit, hint or {}, workers)


class _Model:
    """The integer programme; a literal is a variable or a constant."""

    def __init__(self, facts: Index, budget: int) -> None:
        self.facts = facts
        self.budget = budget
        self.plain = simulate_index(facts, {})
        self.cp = cp_model.CpModel()
        self.dropped: dict[int, cp_model.IntVar] = {
            value: self.cp.new_bool_var(f"d{value}") for value in facts.droppable if facts.size[value]
        }
        self.is_retained: dict[int, Literal] = dict.fromkeys(self.dropped, False)  # by a replay before now
        self.retained_since: dict[int, list[tuple[int, Literal]]] = {}
        self.cost: list[tuple[cp_model.IntVar, int]] = []
        self.inner: dict[int, list[list[tuple[int, Literal]]]] = {}
        self._demanded: dict[tuple[int, int], Literal] = {}
        self._known: dict[frozenset[int], Literal] = {}
        self._certain: set[int] = set()  # kept, or retained when backward asked for them
        for moment, event in enumerate(facts.trace.events, start=len(facts.trace.ops)):
            if isinstance(event, Unpack) and event.value in self.dropped.keys() - self._certain:
                self._replay(moment, event.value)
        self._limit_levels()
        self.cp.minimize(sum(var * units for var, units in self.cost))

    @cached_property
    def unit(self) -> float:
        """Seconds of one unit of the objective."""
        return self.plain.seconds / _UNITS

    # -- literals --

    def _not(self, literal: Literal) -> Literal:
        return (not literal) if isinstance(literal, bool) else literal.negated()

    def _any(self, literals: list[Literal]) -> Literal:
        if any(one is True for one in literals):
            return True
        found = {one.index: one for one in literals if not isinstance(one, bool)}
        if len(found) < 2:
            return next(iter(found.values()), False)
        if any(-index - 1 in found for index in found):
            return True
        key = frozenset(found)
        if key not in self._known:
            result = self._known[key] = self.cp.new_bool_var("")
            self.cp.add_bool_or(found.values()).only_enforce_if(result)
            for one in found.values():
                self.cp.add_implication(one, result)
        return self._known[key]

    def _all(self, *literals: Literal) -> Literal:
        return self._not(self._any([self._not(one) for one in literals]))

    # -- one replay --

    def _is_present(self, value: int) -> Literal:
        if not self.facts.replayable[self.facts.owner[value]]:
            return True
        if self.facts.saved_at[value] < 0:
            return False
        if value not in self.dropped or value in self._certain:
            return True
        return self._any([self._not(self.dropped[value]), self.is_retained[value]])

    def _replay(self, moment: int, target: int) -> None:
        """Which ops run at this unpacking, what that costs, and what stays."""
        facts = self.facts
        runs: dict[int, Literal] = {}
        present: dict[int, Literal] = {}
        wanted: dict[int, list[Literal]] = {facts.owner[target]: [self._not(self._is_present(target))]}
        for op in range(facts.owner[target], -1, -1):
            runs[op] = self._any(wanted.pop(op, []))
            if runs[op] is False:
                del runs[op]
                continue
            for read in facts.reads[op]:
                if read not in present:
                    present[read] = self._is_present(read)
                if facts.replayable[facts.owner[read]]:
                    wanted.setdefault(facts.owner[read], []).append(self._all(runs[op], self._not(present[read])))
        self.cost += [
            (run, round(facts.trace.ops[op].seconds / self.unit))
            for op, run in runs.items()
            if not isinstance(run, bool)
        ]
        self.inner[moment] = self._inside(runs, present, moment)
        for op, run in runs.items():
            for value in facts.outputs[op]:
                if value in self.dropped and facts.last_release[value] > moment and value not in self._certain:
                    self._retain(value, run, moment)
        if facts.last_release[target] > moment:
            self._certain.add(target)

    def _retain(self, value: int, run: Literal, moment: int) -> None:
        fresh = self._all(run, self.dropped[value], self._not(self.is_retained[value]))
        self.retained_since.setdefault(value, []).append((moment, fresh))
        self.is_retained[value] = self._any([self.is_retained[value], fresh])

    def _inside(
        self, runs: dict[int, Literal], present: dict[int, Literal], moment: int
    ) -> list[list[tuple[int, Literal]]]:
        """Bytes at each op of the replay, as terms."""
        facts = self.facts
        order = sorted(runs)
        levels: list[list[tuple[int, Literal]]] = [
            [(facts.fresh[op] + facts.trace.ops[op].transient, runs[op])] for op in order
        ]
        for place, op in enumerate(order):
            for value in facts.outputs[op]:
                if not facts.size[value]:
                    continue
                stays: Literal = False
                if value in self.dropped and facts.last_release[value] > moment and value not in self._certain:
                    stays = self._all(runs[op], self.dropped[value], self._not(self.is_retained[value]))
                absent = self._not(present.get(value, True))
                later: Literal = False
                for after in range(len(order) - 1, place, -1):
                    if value in facts.reads[order[after]]:
                        later = self._any([later, self._all(runs[order[after]], absent)])
                    held = self._any([stays, later])
                    if held is not False:
                        levels[after].append((facts.size[value], held))
        return levels

    # -- levels --

    def _is_demanded(self, value: int, moment: int) -> Literal:
        """Whether a dropped value with handles open at the moment is replayed from this one."""
        key = value, moment
        if key not in self._demanded:
            facts = self.facts
            found: list[Literal] = []
            for reader in facts.readers[value]:
                if not facts.replayable[reader]:
                    continue
                for made in facts.outputs[reader]:
                    if made in self.dropped:
                        dropped = self.dropped[made]
                        if moment <= facts.last_release[made]:
                            found.append(dropped)
                        else:
                            found.append(self._all(dropped, self._is_demanded(made, moment)))
                    elif facts.saved_at[made] < 0:
                        found.append(self._is_demanded(made, moment))
            self._demanded[key] = self._any(found)
        return self._demanded[key]

    def _held(self, value: int, moment: int) -> Literal:
        """Whether the plan, and nobody else, holds the value at the moment's start."""
        facts = self.facts
        wanted: Literal = moment <= facts.last_release[value] or self._is_demanded(value, moment)
        if value not in self.dropped:
            is_fixed = facts.saved_at[value] >= 0 or not facts.replayable[facts.owner[value]]
            return wanted if is_fixed and moment > facts.natural_end[value] else False
        held: list[Literal] = [fresh for since, fresh in self.retained_since.get(value, ()) if since < moment]
        if moment > facts.natural_end[value]:
            held.append(self._not(self.dropped[value]))
        return self._all(self._any(held), wanted)

    def _limit_levels(self) -> None:
        facts = self.facts
        sized = [value for value, owner in enumerate(facts.owner) if owner >= 0 and facts.size[value]]
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for moment in range(facts.moments):
            plain_held = sum(
                facts.size[value]
                for value in sized
                if facts.natural_end[value] < moment <= facts.last_release[value]
                or facts.natural_end[value] < moment <= self._plain_end(value)
            )
            base = int(self.plain.levels[moment]) - plain_held
            terms = [(facts.size[value], self._held(value, moment)) for value in sized]
            start = [(size, held) for size, held in terms if held is not False]
            for inside in [[], *self.inner.get(moment, ())]:
                self._limit(base, [*start, *inside], seen)

    @cached_property
    def _plain_ends(self) -> list[int]:
        return hold_ends(self.facts, fixed_values(self.facts, {}))

    def _plain_end(self, value: int) -> int:
        facts = self.facts
        is_fixed = facts.saved_at[value] >= 0 or not facts.replayable[facts.owner[value]]
        return self._plain_ends[value] if is_fixed else -1

    def _limit(self, base: int, terms: list[tuple[int, Literal]], seen: set[object]) -> None:
        constant = base + sum(size for size, held in terms if held is True)
        variable = [(size, held) for size, held in terms if not isinstance(held, bool)]
        if constant + sum(size for size, _ in variable) <= self.budget:
            return
        key = constant, tuple(sorted((size, held.index) for size, held in variable))
        if key not in seen:
            seen.add(key)
            self.cp.add(sum(size * held for size, held in variable) <= self.budget - constant)

    # -- solving --

    def solved(self, limit: float, hint: Mapping[int, object], workers: int) -> Optimum:
        for value, var in self.dropped.items():
            self.cp.add_hint(var, isinstance(hint.get(value), Drop))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit
        solver.parameters.num_workers = workers
        status = solver.solve(self.cp)
        bound = self.plain.seconds + solver.best_objective_bound * self.unit
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Optimum(float("inf"), bound, {}, status == cp_model.INFEASIBLE)
        decisions = {value: Drop() if solver.value(var) else Keep() for value, var in self.dropped.items()}
        timeline = simulate_index(self.facts, decisions)
        if timeline.peak > self.budget:
            raise AssertionError(f"the model allows what the simulator does not: {timeline.peak} > {self.budget}")
        return Optimum(timeline.seconds, bound, decisions, status == cp_model.OPTIMAL)


# -- steps of about a hundred operators or fewer --


class Language(nn.Module):
    """Blocks between an embedding and a loss over a vocabulary."""

    def __init__(self, block: Callable[[int, int], nn.Module], layers: int, width: int = 256) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(1000, width), nn.LayerNorm(width), nn.Linear(width, 1000)
        self.blocks = nn.Sequential(*(block(width, 4) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting the tokens."""
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Squared(nn.Sequential):
    """Layers, and the mean square of what they give."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        result: Tensor = super().forward(x)
        return result.square().mean()


class Loop(nn.Module):
    """An LSTM cell, a few steps."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean square of all states."""
        state = cell = inputs.new_zeros(inputs.shape[1:])
        loss = inputs.new_zeros(())
        for x in inputs:
            state, cell = self.cell(x, (state, cell))
            loss = loss + state.square().mean()
        return loss


def _layers(count: int, width: int) -> list[nn.Module]:
    return [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.GELU())]


_TOKENS = (8, 512)
STEPS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "mlp": lambda: (Squared(*_layers(12, 512)), (torch.empty(4096, 512),)),
    "gpt": lambda: (Language(GPTBlock, 2), (torch.empty(_TOKENS, dtype=torch.long),)),
    "llama": lambda: (Language(LlamaBlock, 1), (torch.empty(_TOKENS, dtype=torch.long),)),
    "resnet": lambda: (ResNet((1, 1), 32, 10), (torch.empty(16, 3, 64, 64), torch.empty(16, dtype=torch.long))),
    "unet": lambda: (UNet(1, 32), (torch.empty(8, 3, 64, 64), torch.empty(8, 3, 64, 64))),
    "deep_unet": lambda: (UNet(2, 32), (torch.empty(8, 3, 64, 64), torch.empty(8, 3, 64, 64))),
    "lstm": lambda: (Loop(), (torch.empty(5, 1024, 256),)),
}
"""By name, what makes a model and its arguments; called under ``torch.device("meta")``."""


def trace_of(name: str) -> Trace:
    """One of the steps, followed on an H200 that need not be there."""
    with torch.device("meta"):
        model, arguments = STEPS[name]()
    return scrimp.trace_on("H200", model, *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=120.0, help="for each proof")
    parser.add_argument("--budgets", type=int, default=6)
    options = parser.parse_args()
    print("seconds are over plain, in percent; a plan of ours may be better, as it may replay a value twice")
    print(f"{'step':10} {'ops':>4} {'budget':>7} {'ours':>7} {'CP-SAT':>7} {'gap':>6} {'our bound':>9}")
    for name in options.names:
        trace = trace_of(name)
        planner = Planner(trace)
        plain, smallest = planner.plain, planner.smallest()
        for number in range(1, options.budgets + 1):
            budget = smallest.peak + (plain.peak - smallest.peak) * number // (options.budgets + 1)
            ours = scrimp.plan(trace, budget)
            start = time.perf_counter()
            best = optimum(trace, budget, options.seconds, ours.decisions)
            state = "proven" if best.proven else f"proven above {best.bound / plain.seconds - 1:.2%}"
            row = [100 * (seconds / plain.seconds - 1) for seconds in (ours.seconds, best.seconds, ours.bound_seconds)]
            print(
                f"{name:10} {len(trace.ops):4} {budget / plain.peak:7.1%} {row[0]:7.2f} {row[1]:7.2f} "
                f"{row[0] - row[1]:+6.2f} {row[2]:9.2f}  {state} in {time.perf_counter() - start:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
