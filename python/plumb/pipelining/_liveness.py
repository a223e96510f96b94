"""How long a schedule keeps activations, and which of them could take the same memory one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from .. import _C
from ._actions import _schedule
from ._schedule_base import PipelineScheduleMulti
from ._utils import InvalidSchedule, InvalidValue

_Lifetimes = Mapping[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """Result of `analyze_pipeline_activation_liveness`. Slots have the numbers from 0 to `num_slots` - 1."""

    pp_rank: int
    granularity: Literal["microbatch", "stage_microbatch"]
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[tuple[int, int], int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: _Lifetimes = field(repr=False)
    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Returns the slot of a stage's activations for a microbatch. Raises `plumb.Error` (a ValueError too) for others than
        were asked for."""
        return self._of(self.slot_by_stage_and_microbatch, stage_index, microbatch_index)

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> tuple[int, int]:
        """Returns the places of the forward and of the release in the rank's row of `pipeline_order`. Raises as `slot_for`."""
        return self._of(self._activation_lifetime_by_stage_and_microbatch, stage_index, microbatch_index)

    def _of(self, known: Mapping[tuple[int, int], Any], stage: int, microbatch: int) -> Any:
        if (stage, microbatch) not in known:
            raise InvalidValue(f"stage {stage}, microbatch {microbatch} is not in the analysis of rank {self.pp_rank}")
        return known[stage, microbatch]


def analyze_pipeline_activation_liveness(
    schedule: PipelineScheduleMulti,
    *,
    pp_rank: int,
    stage_indices: Sequence[int],
    granularity: Literal["microbatch", "stage_microbatch"],
) -> PipelineActivationLiveness:
    """Returns when the activations of a rank's stages live in the schedule's `pipeline_order`: from a forward to the full
    backward, or to the half for the weights, both included. Activations that do not live at once share a slot.

    `granularity`: "stage_microbatch" gives each stage and microbatch a life of its own; "microbatch" one life to all these
    stages of a microbatch. A rank of DualPipe has those microbatches that it runs.

    Raises `plumb.Error` (a ValueError too) for what the schedule does not have.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise InvalidValue(f'the granularity is "microbatch" or "stage_microbatch", not {granularity!r}')
    if not schedule.pipeline_order:
        raise InvalidSchedule("the schedule has no actions", remedy="load a table first")
    table = _schedule(schedule.pipeline_order, None, schedule._n_microbatches)
    try:
        lives, slots = _C.activation_lives(table, pp_rank, list(stage_indices), granularity == "microbatch")
    except _C.Error as error:
        raise InvalidValue(error.message, kind=error.kind, remedy=error.remedy) from None
    return PipelineActivationLiveness(
        pp_rank,
        granularity,
        tuple(stage_indices),
        schedule._n_microbatches,
        MappingProxyType({(stage, m): slot for stage, m, _, _, slot in lives}),
        slots,
        MappingProxyType({(stage, m): (forward, release) for stage, m, forward, release, _ in lives}),
    )
