"""Tables in files: CSV, and traces to look at."""

from __future__ import annotations

import json
import os

from .. import _C
from ._actions import Table, _table


def read_csv(filename: str) -> Table:
    with open(filename) as file:
        return _table(_C.parse_schedule_csv(file.read(), os.fspath(filename)))


def write_csv(actions: Table, filename: str) -> None:
    with open(filename, "w") as file:
        for row in actions.values():
            file.write(",".join("" if action is None else str(action) for action in row) + "\n")


def _dump_chrometrace(schedule: Table, filename: str) -> None:
    """A table as trace events, an entry a tick."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.is_compute_op else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": tick,
            "dur": 1,
        }
        for rank, row in sorted(schedule.items())
        for tick, action in enumerate(row)
        if action is not None
    ]
    with open(filename, "w") as file:
        json.dump({"traceEvents": events}, file)
