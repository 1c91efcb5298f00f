"""Random traces and plans for property tests, drawn from a seeded generator that Hypothesis controls."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from scrimp._index import index
from scrimp._plan import Decision, Drop, Keep, Store
from scrimp._trace import Event, Op, Release, Resident, Run, Trace, Unpack, Value


def random_trace(random: Random, most_ops: int = 12) -> Trace:
    """A program of random ops (several outputs, in place, not replayable) with a legal backward."""
    count = random.randint(1, most_ops)
    made: list[dict[str, int | None]] = [{"nbytes": random.randint(1, 9), "op": None} for _ in range(2)]
    last_use = [0, 0]
    dead: set[int] = set()
    saved: set[int] = set()
    rows: list[tuple[list[int], list[int], bool]] = []
    for op in range(count):
        alive = [value for value in range(len(made)) if value not in dead]
        recent = alive[-4:] if random.random() < 0.7 else alive
        reads = random.sample(recent, min(len(recent), random.randint(1, 3)))
        for value in reads:
            last_use[value] = op
        if random.random() < 0.25 and reads[0] not in saved:
            old = reads[0]
            dead.add(old)
            made.append({"nbytes": made[old]["nbytes"], "op": op, "output": 0, "overwrites": old})
            last_use.append(op)
        else:
            for output in range(random.choice((1, 1, 1, 2))):
                made.append({"nbytes": random.randint(0, 9), "op": op, "output": output})
                last_use.append(op)
        candidates = [value for value in {*reads, len(made) - 1} if value not in dead]
        saves = [value for value in candidates if random.random() < 0.6]
        if saves and random.random() < 0.2:
            saves.append(saves[0])
        for value in saves:
            saved.add(value)
            last_use[value] = op
        rows.append((reads, saves, random.random() < 0.9))
    overwritten = {value["overwrites"] for value in made if value.get("overwrites") is not None}
    values = []
    for number, fields in enumerate(made):
        death: int | None = last_use[number]
        if number not in overwritten:
            death = random.choice((death, death, min(count - 1, (death or 0) + 2), None))
        values.append(Value(**fields, dies_after=death))  # type: ignore[arg-type]
    ops = tuple(
        Op(
            f"op{i}",
            f"m{i // 3}",
            tuple(reads),
            tuple(saves),
            random.randint(1, 5),
            random.randint(0, 3),
            replayable,
        )
        for i, (reads, saves, replayable) in enumerate(rows)
    )
    bandwidths = random.choice(((0.0, 0.0), (1.0, 2.0), (8.0, 8.0)))
    return Trace(tuple(values), ops, random_backward(random, ops), (Resident("p", 5),), *bandwidths)


def random_backward(random: Random, ops: tuple[Op, ...]) -> tuple[Event, ...]:
    """Backward nodes in mostly reverse order; some never unpack, some release late or never."""
    order = [op for op in reversed(ops) if op.saves]
    if len(order) > 1 and random.random() < 0.3:
        order[0], order[1] = order[1], order[0]
    events: list[Event] = []
    late: list[Event] = []
    for op in order:
        events.extend(Unpack(value) for value in op.saves if random.random() < 0.9)
        net = random.randint(-2, 4)
        events.append(Run(f"d{op.name}", op.module, random.randint(1, 5), max(net, 0) + random.randint(0, 3), net))
        for value in op.saves:
            match random.random():
                case x if x < 0.8:
                    events.append(Release(value))
                case x if x < 0.95:
                    late.append(Release(value))
    return tuple(events + late)


def random_decisions(random: Random, trace: Trace) -> dict[int, Decision]:
    """Any legal decision for each decided value."""
    facts = index(trace)
    decisions: dict[int, Decision] = {}
    for value in facts.decided:
        options: list[Decision] = [Keep()]
        if value in facts.droppable:
            options += [Drop(), Drop(), Drop(random.randint(1, 3))]
        if trace.out_bandwidth and trace.events:
            free_at = random.randint(facts.saved_at[value], len(trace.ops) - 1)
            options.append(Store(free_at, random.randrange(len(trace.events))))
        decisions[value] = random.choice(options)
    for value in sorted(facts.holdable):
        if random.random() < 0.3:
            decisions[value] = Keep()
    return decisions


randoms = st.integers(min_value=0, max_value=2**32).map(Random)
