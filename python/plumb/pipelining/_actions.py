"""Actions and tables: Python's names for them over the engine's."""

from __future__ import annotations

import enum
from typing import NamedTuple

from .. import _C
from ._utils import InvalidSchedule


class _ComputationType(str, enum.Enum):
    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        try:
            return _ComputationType(action)
        except ValueError:
            raise _C.Error(f"there is no action of kind '{action}'") from None


class _Action(NamedTuple):
    """One entry of a time table: ``2F0`` is ``_Action(2, F, 0)``. A pair run as one has its parts in `sub_actions`."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __repr__(self):
        kind = self.computation_type.value
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){kind}"
        return f"{self.stage_index}{kind}{'' if self.microbatch_index is None else self.microbatch_index}"

    __str__ = __repr__

    @property
    def is_compute_op(self) -> bool:
        return self.computation_type in _COMPUTES

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """The action a text says; None for blanks. Anything else that is not exactly one action is an `Error`."""
        return _from_engine(_C.parse_action(action_string))


(FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, UNSHARD, RESHARD, SEND_F, RECV_F, SEND_B, RECV_B, FULL_BACKWARD, OVERLAP_F_B,
 REDUCE_GRAD, WAIT_SEND_F, WAIT_SEND_B, WAIT_REDUCE_GRAD) = _ComputationType  # fmt: skip
F, I, W, B = FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD  # noqa: E741
_COMPUTES = frozenset((F, I, W, B, OVERLAP_F_B))

Table = dict[int, list["_Action | None"]]


def _from_engine(entry) -> _Action | None:
    if entry is None:
        return None
    stage, kind, microbatch, parts = entry
    return _Action(stage, _ComputationType(kind), microbatch, parts and tuple(map(_from_engine, parts)))


def _row(entries) -> list[_Action | None]:
    return [_from_engine(entry) for entry in entries]


def _table(schedule: _C.Schedule) -> Table:
    return {rank: _row(entries) for rank, entries in enumerate(schedule.rows)}


def _schedule(actions: Table, ranks: list[int] | None = None, num_microbatches: int = 0, name: str = "") -> _C.Schedule:
    """Returns the engine's table. Without `ranks` (by stage) the stages are where the table runs them."""
    rows = [actions[rank] for rank in sorted(actions)]
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None and not isinstance(action, _Action):
                raise InvalidSchedule(f"rank {rank}, step {step}: {action!r} is no action")
    return _C.schedule_from_rows(name, rows, num_microbatches, ranks or [])


def _check(schedule: _C.Schedule, *how: bool) -> None:
    if (problems := schedule.check(*how)) != "ok":
        raise InvalidSchedule(problems)


def _validate_schedule(
    actions: Table, pp_group_size: int, num_stages: int, num_microbatches: int, forward_only: bool = False
) -> dict[int, int]:
    """Proves that a table is complete, in order and free of deadlock. Returns which rank runs which stage."""
    if sorted(actions) != list(range(pp_group_size)):
        raise InvalidSchedule(f"the schedule has rows for ranks {sorted(actions)}, the group has {pp_group_size} ranks")
    computes: Table = {
        rank: [a for a in row if a is None or not isinstance(a, _Action) or a.is_compute_op]
        for rank, row in actions.items()
    }
    schedule = _schedule(computes, None, num_microbatches)
    ranks = schedule.ranks
    if len(ranks) != num_stages or -1 in ranks:
        missing = [s for s in range(num_stages) if s >= len(ranks) or ranks[s] < 0] or "none"
        raise InvalidSchedule(f"the schedule is for {len(ranks)} stages, not {num_stages}; not run: {missing}")
    _check(schedule, forward_only)
    return dict(enumerate(ranks))
