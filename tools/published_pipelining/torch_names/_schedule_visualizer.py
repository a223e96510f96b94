"""Pictures of schedules.

ops = get_schedule_ops("InterleavedZeroBubble", 4, 8, add_spacing=True)
visualize_schedule(ops, "schedule.svg")
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from plumb.pipelining._actions import _Action, _ComputationType, _schedule, _table
from plumb.pipelining._utils import InvalidSchedule, InvalidValue
from plumb.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from plumb.pipelining.stage import _PipelineStageBase

from plumb import _C

Rows = list[list["_Action | None"]]


class OpKey(NamedTuple):
    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int


@dataclass
class _ComputationTypeVisual:
    color: str
    text: str = ""
    width: int = 1  # ticks


action_type_to_color_mapping = {
    _ComputationType.FORWARD: _ComputationTypeVisual("blue", "Forward"),
    _ComputationType.BACKWARD_INPUT: _ComputationTypeVisual("teal", "Backward Input"),
    _ComputationType.BACKWARD_WEIGHT: _ComputationTypeVisual("green", "Backward Weight"),
    _ComputationType.FULL_BACKWARD: _ComputationTypeVisual("orange", "Full Backward", 2),
    _ComputationType.OVERLAP_F_B: _ComputationTypeVisual("purple", "Overlap F+B", 3),
}


class _StandIn(_PipelineStageBase):
    """A stage of a pipeline that only has a table."""

    def __init__(self, stage_index: int, num_stages: int, group_size: int):
        self.submod = None
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group, self.group_rank, self.group_size = None, 0, group_size
        self.dw_builder = None


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> Rows:
    """Returns a schedule's table by name or class, a row a rank.

    `add_spacing`: None for every tick in which a rank waits (`action_type_to_color_mapping` says how many ticks an
    action takes). `with_comms`: with sends and receives; `defer_pp_recv`: these as late as possible.
    """
    if add_spacing and with_comms:
        raise InvalidValue("a table is either spaced or has messages, not both")
    if isinstance(schedule, str):
        schedule = get_schedule_class(schedule)
    if not isinstance(schedule, type) or not issubclass(schedule, (PipelineScheduleSingle, PipelineScheduleMulti)):
        raise InvalidValue(f"{schedule} is no schedule")
    if issubclass(schedule, PipelineScheduleSingle):
        if num_stages_per_rank not in (None, 1):
            raise InvalidSchedule(f"{schedule.__name__} has one stage a rank, not {num_stages_per_rank}")
        instance = schedule(_StandIn(0, pp_degree, pp_degree), num_microbatches)
    else:
        bidirectional = schedule._name is not None and _C.schedule_traits(schedule._name)["bidirectional"]
        per_rank = 2 if num_stages_per_rank is None else num_stages_per_rank
        num_stages = pp_degree * (1 if bidirectional else per_rank)
        instance = schedule([_StandIn(i, num_stages, pp_degree) for i in range(per_rank)], num_microbatches)
    if not instance.pipeline_order:
        raise InvalidSchedule(f"{schedule.__name__} has no table")
    rows = [instance.pipeline_order[rank] for rank in range(pp_degree)]
    if with_comms:
        if isinstance(instance, _PipelineScheduleRuntime):
            runtime = instance
            runtime._defer_pp_recv = defer_pp_recv
        else:
            stages = [_StandIn(0, pp_degree, pp_degree)]
            runtime = _PipelineScheduleRuntime(stages, num_microbatches, defer_pp_recv=defer_pp_recv)
            runtime._prepare_schedule_with_comms(
                {r: [a for a in row if a is not None and a.is_compute_op] for r, row in enumerate(rows)}
            )
        rows = [runtime.pipeline_order_with_comms[rank] for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _engine_table(rows: Rows) -> _C.Schedule:
    return _schedule({r: [a for a in row if a is not None and a.is_compute_op] for r, row in enumerate(rows)})


def _widths() -> dict[str, int]:
    kind, visuals = _ComputationType, action_type_to_color_mapping
    return {
        "forward": visuals[kind.FORWARD].width,
        "input": visuals[kind.BACKWARD_INPUT].width,
        "weight": visuals[kind.BACKWARD_WEIGHT].width,
        "full": visuals[kind.FULL_BACKWARD].width,
    }


def _width(action: _Action | None) -> int:
    """Ticks; a pair takes as long as its halves."""
    if action is None:
        return 1
    kinds = [part.computation_type for part in action.sub_actions or (action,)]
    return sum(
        action_type_to_color_mapping[kind].width if kind in action_type_to_color_mapping else 1 for kind in kinds
    )


def add_schedule_op_spacing(schedule: Rows) -> Rows:
    """Returns the table with None for every tick in which a rank waits, and after its end until the last rank's."""
    if not any(schedule):
        return schedule
    table = _engine_table(schedule)
    spans = table.spans(_widths())
    end = max(row[-1][1] for row in spans if row)
    spaced: Rows = []
    for row, times in zip(_table(table).values(), spans):
        line, now = [], 0.0
        for action, (start, _) in zip(row, times):
            line += [None] * round(start - now) + [action]
            now = start + _width(action)  # a pair may last longer, its backward waiting for its gradient
        spaced.append(line + [None] * round(end - now))
    return spaced


def visualize_schedule(schedule: Rows, filename: str | None = None) -> None:
    """Draws a table. A name that ends in ".svg" is drawn by plumb itself, as it would run; for other formats, and to show
    it in a window (without a name), matplotlib must be installed."""
    if filename is not None and os.fspath(filename).lower().endswith(".svg"):
        with open(filename, "w") as file:
            file.write(_engine_table(schedule).render_svg(_widths()))
        return
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    unknown = _ComputationTypeVisual("black")
    figure, axes = plt.subplots(figsize=(2 + max(map(len, schedule)), 2 + len(schedule)))
    size, used, end = 4 + min(len(schedule), max(map(len, schedule))), {}, 0
    for rank, row in enumerate(schedule):
        at = 0
        for action in row:
            visual = unknown if action is None else action_type_to_color_mapping.get(action.computation_type, unknown)
            if action is not None:
                used[visual.text] = visual.color
                axes.barh(rank, _width(action), height=1, left=at, color=visual.color, edgecolor="black")
                axes.text(
                    at + _width(action) / 2, rank, str(action), ha="center", va="center", color="white", size=size
                )
            at += _width(action)
        end = max(end, at)
    axes.set_xlim(0, end)
    axes.set_ylim(len(schedule) - 0.5, -0.5)
    axes.set_yticks(range(len(schedule)), [f"Rank {rank}" for rank in range(len(schedule))], fontsize=size)
    axes.set_xticks([])
    axes.legend(handles=[Patch(color=color, label=text) for text, color in used.items()], loc="upper right")
    if filename is None:
        plt.show()
    else:
        figure.savefig(filename, bbox_inches="tight")
    plt.close(figure)
