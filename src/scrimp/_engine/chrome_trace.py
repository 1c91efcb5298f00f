"""The trace format of chrome://tracing and Perfetto, and how to write it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict


class ChromeEvent(TypedDict):
    """A complete event (phase ``X``); times in microseconds."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: dict[str, int]


class ChromeTrace(TypedDict):
    """A whole trace."""

    traceEvents: list[ChromeEvent]
    displayTimeUnit: str


def write_json(data: Mapping[str, object], path: Path) -> None:
    """Write beside ``path`` and rename: a reader sees the old file or the new one, never half of one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
