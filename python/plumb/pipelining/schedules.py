"""Schedules: how a rank goes through its stages and microbatches. The tables and the runtime are C++.

Every row of the engine's list of schedules (plumb/schedule/names.cpp) has a class here, `ScheduleNAME`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .. import _C
from .._errors import Error, ErrorKind
from ._actions import *  # noqa: F403  (users of torch's schedules import the kinds of actions from here)
from ._actions import _Action, _check, _ComputationType, _validate_schedule  # noqa: F401
from ._run import _PipelineContext, _wait_batch_p2p  # noqa: F401
from ._schedule_base import (  # noqa: F401
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    compute_actions,
)
from ._utils import InvalidSchedule, InvalidValue
from .stage import _PipelineStageBase

__all__ = ["PipelineScheduleMulti", "PipelineScheduleSingle", "ScheduleTable", "get_schedule_class", "search_schedule"]


class _NamedSchedule(PipelineScheduleMulti):
    def __init__(  # torch's signature of these schedules
        self, stages, n_microbatches, loss_fn=None, args_chunk_spec=None, kwargs_chunk_spec=None, output_merge_spec=None,
        *args, **kwargs,
    ):  # fmt: skip
        chunks = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *chunks, None, *args, **kwargs)


class _LoopedBFS(_NamedSchedule):
    def __init__(self, stages, n_microbatches, loss_fn=None, output_merge_spec=None, *args, **kwargs):  # torch's signature
        super().__init__(stages, n_microbatches, loss_fn, None, None, output_merge_spec, *args, **kwargs)


class _DualPipeV(_NamedSchedule):
    """At least as many microbatches as stages (``ScheduleTable(..., table="DualPipeV")`` takes fewer)."""

    def _make(self) -> None:
        super()._make()
        if self._n_microbatches < self._num_stages:
            raise InvalidValue(
                f"DualPipeV is for at least as many microbatches as stages, not {self._n_microbatches} for {self._num_stages}",
                remedy=f'ScheduleTable(stages, {self._n_microbatches}, table="DualPipeV")',
            )


_SPECIAL = {"LoopedBFS": _LoopedBFS, "DualPipeV": _DualPipeV}

_BIDIRECTIONAL = """
    The first half of a batch is given on rank 0 with its targets on the last rank, the second half the other way round:
    every rank of the two gets the whole batch and uses its share.
"""


def _schedule_class(name: str) -> type[_PipelineSchedule]:
    """The class of a row of the engine's list. It takes one stage where no rank has more, else a list of stages."""
    traits = _C.schedule_traits(name)
    one_stage = traits["max_stages_per_rank"] == 1 and not traits["bidirectional"]
    base = _SPECIAL.get(name, PipelineScheduleSingle if one_stage else _NamedSchedule)
    more = _BIDIRECTIONAL if traits["bidirectional"] else base.__doc__ if name in _SPECIAL else None
    text = "\n\n    ".join(filter(None, [traits["summary"], more and more.strip()]))
    return type(f"Schedule{name}", (base,), {"_name": name, "__doc__": text, "__module__": __name__})


_CLASSES = {name: _schedule_class(name) for name in _C.schedule_names()}
globals().update({cls.__name__: cls for cls in _CLASSES.values()})
__all__ += [cls.__name__ for cls in _CLASSES.values()]


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
        self, stages: list[_PipelineStageBase], n_microbatches: int, loss_fn: Callable | None = None, *, table, **kwargs
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
    """A table found for these costs, one stage a rank (arXiv 2401.10241, section 3.1).

    `costs`: "forward", "input", "weight", "communication", each one number or one a stage, in any unit of time.
    `memory_limit`: microbatches a rank may hold (1F1B holds `num_ranks`); 0: any.
    """
    return _C.search_schedule(num_ranks, n_microbatches, costs, float(memory_limit), 0.0)


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """The class of a schedule by its name, upper and lower case alike."""
    classes = {**_CLASSES, "PipelineScheduleSingle": PipelineScheduleSingle, "PipelineScheduleMulti": PipelineScheduleMulti}
    for name, cls in classes.items():
        if name.lower() == schedule_name.lower():
            return cls
    raise InvalidValue(
        f"there is no schedule named '{schedule_name}'", kind=ErrorKind.UnknownName, remedy=f"one of {', '.join(classes)}"
    )
