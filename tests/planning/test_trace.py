"""Traces and plans as data: checked, saved, loaded, compared."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings

from scrimp._plan import Change, Drop, Keep, Plan, Store
from scrimp._trace import Event, Op, Release, Run, Trace, Unpack, Value
from scrimp.errors import PlanError, TraceError

from .models import gpt
from .programs import random_trace, randoms

STEP = Trace(
    values=(
        Value(8, None),
        Value(8, 0, dies_after=1),
        Value(8, 1, overwrites=1),
        Value(4, 1, output=1, dies_after=2),
    ),
    ops=(Op("a", "m", (0,), (), 1.0), Op("b_", "m", (1,), (2,), 1.0), Op("c", "m", (2, 3), (3,), 1.0)),
    events=(
        Unpack(3),
        Run("dc", "m", 1.0, 8, 8),
        Release(3),
        Unpack(2),
        Run("db", "m", 1.0, 0, -8),
        Release(2),
    ),
)
PLAN = Plan("ab", 100, {2: Drop(1), 3: Keep(), 5: Store(1, 2)}, 90, 2.0, 1.5, 1.6)


@settings(max_examples=30)
@given(randoms)
def test_saved_trace_loads_equal(tmp_path_factory: pytest.TempPathFactory, random: Random) -> None:
    """Every legal trace survives the disk, and keeps its fingerprint."""
    trace = random_trace(random)
    path = tmp_path_factory.getbasetemp() / "trace.json"
    trace.save(path)
    loaded = Trace.load(path)
    assert loaded == trace
    assert loaded.fingerprint() == trace.fingerprint()


def test_saved_files_are_private_and_leave_nothing_else(tmp_path: Path) -> None:
    """Only the owner may read a saved file, and no temporary file stays behind."""
    STEP.save(tmp_path / "trace.json")
    PLAN.save(tmp_path / "plan.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "trace.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_fingerprint_ignores_times_alone() -> None:
    """Times vary from run to run and do not change it; sizes and order do."""
    faster = replace(STEP, ops=(replace(STEP.ops[0], seconds=0.5), *STEP.ops[1:]), out_bandwidth=1.0)
    larger = replace(STEP, ops=(replace(STEP.ops[0], transient=1), *STEP.ops[1:]))
    reordered = replace(STEP, events=(STEP.events[3], *STEP.events[:3], *STEP.events[4:]))
    assert faster.fingerprint() == STEP.fingerprint()
    assert len({step.fingerprint() for step in (STEP, larger, reordered)}) == 3


VALUE_1, VALUE_2 = STEP.values[1], STEP.values[2]


@pytest.mark.parametrize(
    ("value", "wrong", "message"),
    [
        (1, replace(VALUE_1, nbytes=-1), "bytes of at least 0"),
        (1, replace(VALUE_1, op=9), "there is no op 9"),
        (1, replace(VALUE_1, dies_after=0), "died after op 0|must die after"),
        (1, replace(VALUE_1, dies_after=7), "cannot die after op 7"),
        (1, replace(VALUE_1, dies_after=2), "must die after that op"),
        (2, replace(VALUE_2, overwrites=0), "must read value 0"),
        (2, replace(VALUE_2, overwrites=9), "there is no value 9"),
        (2, replace(VALUE_2, nbytes=9), "shares a storage of 8 bytes"),
        (2, replace(VALUE_2, output=1), "output 1 of its op is taken"),
        (0, Value(8, None, overwrites=1), "overwrites nothing"),
    ],
)
def test_refuses_contradictory_values(value: int, wrong: Value, message: str) -> None:
    """A trace with an impossible value cannot be made."""
    values = list(STEP.values)
    values[value] = wrong
    with pytest.raises(TraceError, match=message):
        replace(STEP, values=tuple(values))


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        (0, Op("a", "m", (9,), (), 1.0), "there is no value 9"),
        (0, Op("a", "m", (1,), (), 1.0), "before op 0 made it"),
        (0, Op("a", "m", (), (2,), 1.0), "before op 1 made it"),
        (1, Op("b", "m", (1,), (1, 2), 1.0), "saved and overwritten"),
        (2, Op("c", "m", (1,), (3,), 1.0), "value 1 died after op 1"),
        (2, Op("c", "m", (2, 2), (3,), 1.0), "reads a value twice"),
        (0, Op("a", "m", (0,), (), float("nan")), "need seconds"),
        (0, Op("a", "m", (0,), (), 1.0, transient=-1), "transient bytes"),
    ],
)
def test_refuses_contradictory_ops(op: int, wrong: Op, message: str) -> None:
    """A trace with an impossible op cannot be made."""
    ops = list(STEP.ops)
    ops[op] = wrong
    with pytest.raises(TraceError, match=message):
        replace(STEP, ops=tuple(ops))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Unpack(1), "no open handle"),
        (Release(3), "no open handle"),
        (Run("d", "m", 1.0, -1, -1), "need a peak"),
        (Run("d", "m", 1.0, 4, 5), "need a peak"),
        (Run("d", "m", -1.0, 4, 4), "need seconds"),
    ],
)
def test_refuses_contradictory_events(event: Event, message: str) -> None:
    """A trace with an impossible event cannot be made."""
    with pytest.raises(TraceError, match=message):
        replace(STEP, events=(*STEP.events, event))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format="x"), "does not hold a scrimp trace"),
        (lambda content: content.update(version=99), "version 99"),
        (lambda content: content.update(ops=3), "need a list"),
        (lambda content: content["ops"][0].pop("name"), r"ops\[0\]: need the fields"),
        (lambda content: content["ops"][0].update(reads=["x"]), r"ops\[0\].reads"),
        (lambda content: content["values"][0].update(nbytes=1.5), r"values\[0\].nbytes"),
        (lambda content: content["events"][0].update(event="Jump"), r"events\[0\]"),
        (lambda content: content.pop("in_bandwidth"), "in_bandwidth"),
    ],
)
def test_loading_checks_every_field(tmp_path: Path, change: object, message: str) -> None:
    """A file that was tampered with is refused, and the error says where."""
    STEP.save(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert callable(change)
    change(content)
    (tmp_path / "trace.json").write_text(json.dumps(content))
    with pytest.raises(TraceError, match=message):
        Trace.load(tmp_path / "trace.json")


def test_plan_loads_equal(tmp_path: Path) -> None:
    """A plan survives the disk, with each kind of decision."""
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize("text", ["", "[]", '{"format": "scrimp trace", "version": 1}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    """What is not JSON, not an object, or another format is no plan."""
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_diff_lists_what_changed() -> None:
    """Only values decided differently appear, with both decisions."""
    other = replace(PLAN, decisions={2: Drop(1), 3: Drop(), 7: Keep()})
    assert PLAN.diff(other) == (
        Change(3, Keep(), Drop()),
        Change(5, Store(1, 2), None),
        Change(7, None, Keep()),
    )


def test_model_traces_are_legal() -> None:
    """The transformer used elsewhere in these tests passes its own checks and releases what it saves."""
    trace = gpt(layers=2)
    saves = sum(len(op.saves) for op in trace.ops)
    assert saves == sum(isinstance(event, Release) for event in trace.events)
