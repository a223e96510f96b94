"""Private functions on tables of torch's ``schedules``."""

from __future__ import annotations

import json
import os

import torch.distributed as dist  # noqa: F401  (replaced by tests)
from plumb.pipelining._actions import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
    Table,
    W,
    _Action,
    _row,
    _table,
)
from plumb.pipelining._utils import InvalidSchedule
from plumb.pipelining.schedules import PipelineScheduleMulti

from plumb import _C

from ._lowering import Known, check_rows, late_receives, parts_of, rank_of_entries, stuck, with_messages
from ._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping  # noqa: F401


def _with_comms(self: PipelineScheduleMulti) -> Table:
    """The table with sends, receives, UNSHARD, RESHARD and REDUCE_GRAD."""
    order, table = self.pipeline_order or {}, self._engine_table
    if any(action is not None and not action.is_compute_op for row in order.values() for action in row):
        return order
    try:
        if table is not None and table.bidirectional:
            rows, ranks = list(_table(table).values()), table.ranks
            rank_of = rank_of_entries(rows, ranks)
        else:
            rows = [_row(_C.with_surroundings(row, 3, True)) for row in _rows(order)]
            ranks, rank_of = [rank for _, rank in sorted(self.stage_index_to_group_rank.items())], None
        lowered = with_messages(rows, ranks, rank_of)
        return dict(enumerate(late_receives(lowered, ranks, rank_of) if self._defer_pp_recv else lowered))
    except _C.Error as error:
        raise InvalidSchedule(f"Malformed compute schedule: {error}") from None


def _dump_csv(self: PipelineScheduleMulti, filename: str, format: str = "compute_comms") -> None:
    actions = self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms
    lines = [",".join("" if action is None else str(action) for action in row) + "\n" for row in actions.values()]
    _C.write_file(os.fspath(filename), "".join(lines))


PipelineScheduleMulti.pipeline_order_with_comms = property(
    _with_comms, lambda self, actions: setattr(self, "pipeline_order", actions)
)
PipelineScheduleMulti._dump_csv = _dump_csv


def _ranks(stage_to_rank, num_stages: int) -> list[int]:
    return [stage_to_rank(stage) for stage in range(num_stages)]


def _rows(actions: Table) -> list[list[_Action | None]]:
    return [actions[rank] for rank in sorted(actions)]


def _format_pipeline_order(pipeline_order: Table, error_step_number: int | None = None) -> str:
    """Returns a table as text, a line a step and a column a rank; one step may be marked as where an error happened."""
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
    merged: list[_Action] = []
    for action in filter(None, compute_actions):
        stage, kind, microbatch, _ = action
        if kind is W and merged and merged[-1] == _Action(stage, I, microbatch):
            merged[-1] = _Action(stage, B, microbatch)
        else:
            merged.append(action)
    return merged


def _add_send_recv(compute_actions: Table, stage_to_rank, num_stages: int) -> Table:
    """The table with sends and receives. Stages talk to their neighbors; `stage_to_rank(stage)` says where they are."""
    try:
        lowered = with_messages(_rows(compute_actions), _ranks(stage_to_rank, num_stages))
    except _C.Error as error:
        raise InvalidSchedule(f"Malformed compute schedule: {error}") from None
    return dict(zip(sorted(compute_actions), lowered))


def _defer_recv_ops(actions: Table, stage_to_rank) -> Table:
    """Receives as late as they may be, right before the entry that uses them."""
    stages = 1 + max(
        (part.stage_index for row in actions.values() for a in row if a for part in a.sub_actions or (a,)), default=-1
    )
    try:
        late = late_receives(_rows(actions), _ranks(stage_to_rank, stages))
    except _C.Error as error:
        raise InvalidSchedule(str(error)) from None
    return dict(zip(sorted(actions), late))


class _NotProgressing(InvalidSchedule, ValueError):
    pass


def _simulate_comms_compute(pipeline_order: Table, stage_to_rank, num_stages: int) -> Table:
    """Returns a table with messages played in rounds, an entry a rank and round; None where a rank waits. A rank that waited
    for a later one may still run in the same round."""
    ranks, rows = _ranks(stage_to_rank, num_stages), [list(filter(None, row)) for row in _rows(pipeline_order)]
    known, done, played = [Known() for _ in rows], [0] * len(rows), [[] for _ in rows]

    def run(rank: int) -> _Action | None:
        stage, kind, microbatch, _ = action = rows[rank][done[rank]]
        if kind in (SEND_F, SEND_B):
            ready = (F if kind is SEND_F else I, stage, microbatch) in known[rank]
        elif kind in (RECV_F, RECV_B):
            send, other = (SEND_F, stage - 1) if kind is RECV_F else (SEND_B, stage + 1)
            ready = (send, other, microbatch) in known[ranks[other]]
        else:
            ready = known[rank].has_inputs(action, num_stages)
        if not ready:
            return None
        for part in parts_of(action):
            known[rank].put(part)
        done[rank] += 1
        return action

    try:
        check_rows(rows, ranks)
        while left := [rank for rank, row in enumerate(rows) if done[rank] < len(row)]:
            for rank in left:
                played[rank].append(run(rank))
            if not any(played[rank][-1] for rank in left):
                raise stuck(rows, done)
            for rank in left:
                if played[rank][-1] is None:
                    played[rank][-1] = run(rank)
    except _C.Error as error:
        raise _NotProgressing(f"Schedule is not progressing: {error}") from None
    return dict(zip(sorted(pipeline_order), played))


def _simulate(self: PipelineScheduleMulti) -> Table:
    return _simulate_comms_compute(
        self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages
    )


PipelineScheduleMulti._simulate = _simulate


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


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
    """Starts messages and returns what to wait for. Those that all go one way are started one by one, so that none waits
    for another."""
    kinds = {op.op for op in p2p_ops}
    if kinds == {dist.isend}:
        return [dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in p2p_ops]
    if kinds == {dist.irecv}:
        return [dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in p2p_ops]
    return dist.batch_isend_irecv(p2p_ops) if p2p_ops else []


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[dist.Work]]:
    """As `_batch_p2p`, rank by rank, in ascending order."""
    by_peer: dict[int, list[dist.P2POp]] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: _batch_p2p(ops, desc) for peer, ops in sorted(by_peer.items())}
