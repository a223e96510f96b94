"""Schedules: how a rank goes through its stages and microbatches. The tables and the runtime are C++.

Every row of the engine's list of schedules (plumb/schedule/names.cpp) has a class here, `ScheduleNAME`. One that takes one
stage a rank is a `PipelineScheduleSingle`, any other takes a list of stages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from .. import _C
from .._errors import Error, ErrorKind
from ._actions import *  # noqa: F403  (users of torch's schedules import the kinds of actions from here)
from ._actions import _Action, _check, _ComputationType, _validate_schedule  # noqa: F401
from ._liveness import PipelineActivationLiveness, analyze_pipeline_activation_liveness
from ._run import _PipelineContext, _wait_batch_p2p  # noqa: F401
from ._schedule_base import (  # noqa: F401
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    compute_actions,
)
from ._utils import InvalidSchedule, InvalidValue
from .microbatch import TensorChunkSpec
from .stage import _PipelineStageBase

__all__ = [
    "PipelineActivationLiveness",
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
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
    "search_schedule",
]


class _NamedSchedule(PipelineScheduleMulti):
    def __init__(  # torch's signature of these schedules
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ):
        chunks = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        options = (None, scale_grads, backward_requires_autograd)
        taken = {"defer_pp_recv": defer_pp_recv, "max_active_stages": max_active_stages}
        super().__init__(stages, n_microbatches, loss_fn, *chunks, *options, **taken)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards (arXiv 1811.06965)."""

    _name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """Forwards until the first backward can come, then one forward, one backward (arXiv 2006.09503)."""

    _name = "1F1B"


class ScheduleInterleaved1F1B(_NamedSchedule):
    """1F1B over several stages a rank, microbatches in rounds (arXiv 2104.04473). Any number of microbatches."""

    _name = "Interleaved1F1B"


class ScheduleLoopedBFS(_NamedSchedule):
    """All microbatches through one stage of a rank before the next stage (arXiv 2211.05953)."""

    _name = "LoopedBFS"

    def __init__(  # torch's signature
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Literal["full", "auto"] | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
    ):
        options = (scale_grads, backward_requires_autograd, defer_pp_recv, max_active_stages)
        super().__init__(stages, n_microbatches, loss_fn, None, None, output_merge_spec, *options)


class ScheduleInterleavedZeroBubble(_NamedSchedule):
    """Interleaved 1F1B with weight backwards where a rank would wait (arXiv 2401.10241)."""

    _name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_NamedSchedule):
    """Two stages a rank in a V; no bubble if forward, input and weight backward cost the same (arXiv 2401.10241, section 6)."""

    _name = "ZBVZeroBubble"


class ScheduleDualPipeV(_NamedSchedule):
    """Two stages a rank in a V, forwards and backwards of different microbatches in pairs (DualPipe cut in half).

    At least as many microbatches as stages (``ScheduleTable(..., table="DualPipeV")`` takes fewer).
    """

    _name = "DualPipeV"

    def _make(self) -> None:
        super()._make()
        if self._n_microbatches < self._num_stages:
            raise InvalidValue(
                f"DualPipeV is for at least as many microbatches as stages, not {self._n_microbatches} for {self._num_stages}",
                remedy=f'ScheduleTable(stages, {self._n_microbatches}, table="DualPipeV")',
            )


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B with the backward halved, in 1F1B's memory (arXiv 2401.10241)."""

    _name = "ZBH1"


class ScheduleZBH2(PipelineScheduleSingle):
    """1F1B with the backward halved, with about twice its memory and hardly a bubble (arXiv 2401.10241)."""

    _name = "ZBH2"


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


_CLASSES: dict[str, type[_PipelineSchedule]] = {
    name.removeprefix("Schedule"): cls for name, cls in globals().items() if name.startswith("Schedule")
}


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


class ScheduleTable(_NamedSchedule):
    """Any table: `table` is the name of a schedule, a CSV file, {rank: [action, ...]}, or the engine's own (such as
    from `search_schedule`)."""

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        *,
        table: str | os.PathLike[str] | dict[int, list[_Action | None]] | _C.Schedule,
        **kwargs: Any,
    ):
        super().__init__(stages, n_microbatches, loss_fn, **kwargs)
        if isinstance(table, _C.Schedule):
            _check(table)
            if table.num_microbatches != n_microbatches:
                raise InvalidSchedule(f"the table has {table.num_microbatches} microbatches, not {n_microbatches}")
            self._take(table)
        elif isinstance(table, dict):
            self._prepare_schedule_with_comms(compute_actions(table))
        elif isinstance(table, str) and table.lower() in map(str.lower, _CLASSES):
            self._name = table
            self._make()
        else:
            self._load_csv(os.fspath(table))


def search_schedule(num_ranks: int, n_microbatches: int, costs: dict[str, Any], memory_limit: float = 0) -> _C.Schedule:
    """Returns a table found for these costs, one stage a rank (arXiv 2401.10241, section 3.1).

    `costs`: "forward", "input", "weight", "communication", each one number or one a stage, in any unit of time.
    `memory_limit`: microbatches a rank may hold (1F1B holds `num_ranks`); 0: any.
    """
    return _C.search_schedule(num_ranks, n_microbatches, costs, float(memory_limit))


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """Returns the class of a schedule by its name, upper and lower case alike."""
    classes = {**_CLASSES, "PipelineScheduleSingle": PipelineScheduleSingle, "PipelineScheduleMulti": PipelineScheduleMulti}
    for name, cls in classes.items():
        if name.lower() == schedule_name.lower():
            return cls
    raise InvalidValue(
        f"there is no schedule named '{schedule_name}'", kind=ErrorKind.UnknownName, remedy=f"one of {', '.join(classes)}"
    )
