"""Tables in CSV files."""

from __future__ import annotations

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
