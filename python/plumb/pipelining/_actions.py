"""Actions and tables: Python's names for them over the engine's."""

from __future__ import annotations

import enum
from typing import NamedTuple

from .. import _C
from ._errors import InvalidSchedule


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


FORWARD = F = _ComputationType.FORWARD
BACKWARD_INPUT = I = _ComputationType.BACKWARD_INPUT  # noqa: E741
BACKWARD_WEIGHT = W = _ComputationType.BACKWARD_WEIGHT
FULL_BACKWARD = B = _ComputationType.FULL_BACKWARD
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
REDUCE_GRAD = _ComputationType.REDUCE_GRAD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
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
    """The engine's table. Without `ranks` (by stage) the stages are where the table runs them."""
    rows = [actions[rank] for rank in sorted(actions)]
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None and not isinstance(action, _Action):
                raise InvalidSchedule(f"rank {rank}, step {step}: {action!r} is no action")
    return _C.schedule_from_rows(name, rows, num_microbatches, ranks or [])


def _ranks(stage_to_rank, num_stages: int) -> list[int]:
    return [stage_to_rank(stage) for stage in range(num_stages)]


def _format_pipeline_order(pipeline_order: Table, error_step_number: int | None = None) -> str:
    """A table as text, a line a step and a column a rank; one step may be marked as where an error happened."""
    steps = max((len(row) for row in pipeline_order.values()), default=0)
    digits = len(str(steps - 1))
    cells = [
        [str(row[i]) if i < len(row) and row[i] is not None else "" for _, row in sorted(pipeline_order.items())]
        for i in range(steps)
    ]
    heads = [f"Rank {i}" for i in range(len(pipeline_order))]
    # No wider than a column needs, and aligned with its head.
    widths = [max([len(f"Step {0:0{digits}}"), *(len(row[i]) for row in cells)]) for i in range(len(heads))]
    lines = [" " * (digits + 7) + " ".join(head.ljust(width) for head, width in zip(heads, widths))]
    for i, row in enumerate(cells):
        mark = " <-- ERROR HERE" if i == error_step_number else ""
        lines.append(f"Step {i:0{digits}}: " + " ".join(cell.ljust(w) for cell, w in zip(row, widths)) + mark)
    return "\n".join(lines) + "\n"


def _add_reduce_grad(actions: list[_Action | None], n_microbatches: int) -> list[_Action]:
    """REDUCE_GRAD of a stage right behind the last of its `n_microbatches` weight gradients; idle entries go."""
    out: list[_Action] = []
    counts: dict[int, int] = {}
    for action in actions:
        if action is None:
            continue
        out.append(action)
        for stage, kind, _, _ in action.sub_actions or (action,):
            if kind in (W, B):
                counts[stage] = counts.get(stage, 0) + 1
                if counts[stage] == n_microbatches:
                    out.append(_Action(stage, REDUCE_GRAD))
    return out


def _add_unshard_reshard(compute_actions: list[_Action | None], max_active_stages: int = 3) -> list[_Action]:
    """UNSHARD and RESHARD around use, so that at most `max_active_stages` stages of a rank are whole at a time."""
    return _row(_C.with_surroundings(compute_actions, max_active_stages, False))


def _merge_bw(compute_actions: list[_Action | None]) -> list[_Action]:
    """I directly followed by its W becomes B; idle entries go."""
    return _table(_schedule({0: compute_actions}).merge_backwards())[0]


def _add_send_recv(compute_actions: Table, stage_to_rank, num_stages: int) -> Table:
    """The table with sends and receives. Stages talk to their neighbours; `stage_to_rank(stage)` says where they are."""
    schedule = _schedule(compute_actions, _ranks(stage_to_rank, num_stages))
    try:
        lowered = schedule.add_messages_in_turns()
    except _C.Error as error:
        raise InvalidSchedule(f"Malformed compute schedule: {error}") from None
    return dict(zip(sorted(compute_actions), _table(lowered).values()))


def _defer_recv_ops(actions: Table, stage_to_rank) -> Table:
    """Receives as late as they may be, right before the entry that uses them."""
    stages = 1 + max(
        (part.stage_index for row in actions.values() for a in row if a for part in a.sub_actions or (a,)), default=-1
    )
    try:
        late = _schedule(actions, _ranks(stage_to_rank, stages)).defer_receives()
    except _C.Error as error:
        raise InvalidSchedule(str(error)) from None
    return dict(zip(sorted(actions), _table(late).values()))


def _simulate_comms_compute(pipeline_order: Table, stage_to_rank, num_stages: int) -> Table:
    """A table with messages played in rounds, an entry a rank and round; None where a rank waits."""
    try:
        played = _schedule(pipeline_order, _ranks(stage_to_rank, num_stages)).play_in_turns()
    except _C.Error as error:
        raise _NotProgressing(f"Schedule is not progressing: {error}") from None
    return dict(zip(sorted(pipeline_order), _table(played).values()))


class _NotProgressing(InvalidSchedule, ValueError):
    pass


def _validate_schedule(
    actions: Table, pp_group_size: int, num_stages: int, num_microbatches: int, forward_only: bool = False
) -> dict[int, int]:
    """Proves that a table is complete, in order and free of deadlock, and answers which rank runs which stage."""
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
    problems = schedule.check(forward_only)
    if problems != "ok":
        raise InvalidSchedule(f"{problems}\n\nFull pipeline schedule:\n{_format_pipeline_order(actions)}")
    return dict(enumerate(ranks))
