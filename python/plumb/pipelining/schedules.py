"""Schedules: how a rank goes through its stages and microbatches. The tables and the runtime are C++."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist  # noqa: F401  (replaced here by torch's users in their tests)

from .. import _C
from .._C import Error
from ._actions import (  # noqa: F401  (torch's users import them from here)
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    I,
    Table,
    W,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _defer_recv_ops,
    _format_pipeline_order,
    _merge_bw,
    _schedule,
    _simulate_comms_compute,
    _table,
    _validate_schedule,
)
from ._errors import InvalidSchedule, InvalidValue
from ._hooks import _PipelineContext, _wait_batch_p2p  # noqa: F401
from ._schedule_base import _TARGET_CHUNK_SPEC, PipelineScheduleSingle, _PipelineSchedule, compute_actions  # noqa: F401
from ._schedule_files import _dump_chrometrace  # noqa: F401
from ._schedule_multi import (  # noqa: F401
    PipelineScheduleMulti,
    _check_torch_compile_compatibility,
    _PipelineScheduleRuntime,
)
from ._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping  # noqa: F401
from .microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks  # noqa: F401
from .stage import PipelineStage, _PipelineStageBase, _RecvInfo  # noqa: F401

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleTable",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
    "search_schedule",
]


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    _name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """Forwards until the first backward can come, then one forward, one backward (arXiv 2006.09503)."""

    _name = "1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B with the backward halved, in 1F1B's memory (arXiv 2401.10241)."""

    _name = "ZBH1"


class ScheduleZBH2(PipelineScheduleSingle):
    """The same with about twice the memory and hardly a bubble (arXiv 2401.10241)."""

    _name = "ZBH2"


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """Forwards only."""

    _name = "GPipe"

    def _step_microbatches(
        self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, return_outputs=True, loss_kwargs=None
    ):
        if target_mbs is not None or losses is not None:
            raise Error("a schedule of forwards only takes no target and no losses")
        self._has_backward = False
        super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, return_outputs)


class ScheduleLoopedBFS(_PipelineScheduleRuntime):
    """All microbatches through one stage of a rank before the next stage (arXiv 2211.05953)."""

    _name = "LoopedBFS"

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ):
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )


class _NamedSchedule(_PipelineScheduleRuntime):
    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ):
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
        )


class ScheduleInterleaved1F1B(_NamedSchedule):
    """1F1B over several stages a rank, microbatches in rounds (arXiv 2104.04473). Any number of microbatches."""

    _name = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(_NamedSchedule):
    """Interleaved 1F1B with weight backwards where a rank would wait (arXiv 2401.10241)."""

    _name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_NamedSchedule):
    """Two stages a rank in a V; no bubble if all three parts cost the same (arXiv 2401.10241, section 6)."""

    _name = "ZBVZeroBubble"


class ScheduleDualPipeV(_NamedSchedule):
    """Two stages a rank in a V, forwards and backwards of different microbatches in pairs. At least as many microbatches
    as stages (``ScheduleTable(..., table="DualPipeV")`` takes fewer)."""

    _name = "DualPipeV"

    def _make(self) -> None:
        super()._make()
        if self._n_microbatches < self._num_stages:
            raise InvalidValue(
                f"DualPipeV is for at least as many microbatches as stages, not {self._n_microbatches} for "
                f'{self._num_stages}\n  try: ScheduleTable(stages, {self._n_microbatches}, table="DualPipeV")'
            )

    def _order_of(self, table: _C.Schedule) -> Table:
        return _table(table)  # pairs last as long as they last: no ticks


class ScheduleVHalf(_NamedSchedule):
    """Two stages a rank in a V, about half of 1F1B's memory (arXiv 2405.15362)."""

    _name = "VHalf"


class ScheduleVMin(_NamedSchedule):
    """Two stages a rank in a V, about a third of 1F1B's memory (arXiv 2405.15362)."""

    _name = "VMin"


class ScheduleDualPipe(_NamedSchedule):
    """Every stage on two ranks, s and p - 1 - s; half of the microbatches enter at either end (arXiv 2412.19437).

    The first half of a batch is given on rank 0 with its targets on the last rank, the second half the other way round:
    every rank of the two gets the whole batch and uses its share.
    """

    _name = "DualPipe"


class ScheduleTable(_NamedSchedule):
    """Any table: `table` is the name of a schedule, a CSV file, {rank: [action, ...]}, or the engine's own (such as
    from `search_schedule`)."""

    def __init__(
        self, stages: list[_PipelineStageBase], n_microbatches: int, loss_fn: Callable | None = None, *, table, **kwargs
    ):
        super().__init__(stages, n_microbatches, loss_fn, **kwargs)
        if isinstance(table, _C.Schedule):
            problems = table.check()
            if problems != "ok" or table.num_microbatches != n_microbatches:
                raise InvalidSchedule(
                    problems
                    if problems != "ok"
                    else f"the table has {table.num_microbatches} microbatches, not {n_microbatches}"
                )
            self._take(table)
        elif isinstance(table, dict):
            self._prepare_schedule_with_comms(compute_actions(table))
        elif isinstance(table, str) and table.lower() in map(str.lower, _C.schedule_names()):
            self._name = table
            self._make()
        else:
            self._load_csv(os.fspath(table))


def search_schedule(num_ranks: int, n_microbatches: int, costs: dict[str, Any], memory_limit: float = 0) -> _C.Schedule:
    """A table found for these costs, one stage a rank (arXiv 2401.10241, section 3.1).

    `costs`: "forward", "input", "weight", "communication", each one number or one a stage, in any unit of time.
    `memory_limit`: microbatches a rank may hold (1F1B holds `num_ranks`); 0: any.
    """
    return _C.search_schedule(num_ranks, n_microbatches, costs, float(memory_limit), 0.0)


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a schedule by its name, upper and lower case alike."""
    classes = [*_named(PipelineScheduleSingle), *_named(PipelineScheduleMulti)]
    by_name = {cls._name: cls for cls in classes if cls is not _ScheduleForwardOnly}
    by_name |= {"PipelineScheduleSingle": PipelineScheduleSingle, "PipelineScheduleMulti": PipelineScheduleMulti}
    for name, cls in by_name.items():
        if name.lower() == schedule_name.lower():
            return cls
    raise InvalidValue(f"there is no schedule named '{schedule_name}'; there are {list(by_name)}")


def _named(base: type) -> list[type]:
    found = [base] if base._name is not None and base.__module__.startswith(__package__ + ".") else []
    return found + [cls for sub in base.__subclasses__() for cls in _named(sub)]
