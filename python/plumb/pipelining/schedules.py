"""Schedules: how a rank goes through its stages and microbatches. The tables and the runtime are C++."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

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
from ._errors import InvalidSchedule, InvalidType, InvalidValue
from ._run import Run, group_timeout
from .microbatch import TensorChunkSpec, _split_tensor, merge_chunks, split_args_kwargs_into_chunks
from .stage import _PipelineStageBase

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

_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


class _PipelineSchedule:
    """What all schedules have in common.

    `loss_fn(output, target, **loss_kwargs)` answers one number a microbatch. With `scale_grads` it is a mean over the
    microbatch's rows: gradients become those of the mean over the batch, also where microbatches differ in size.
    Without, they are summed. Gradients that are there before a step stay and are added to.

    To be set before the first step:
        timeout: seconds (or a timedelta) to wait for another rank; None: the group's own if it was set, else 60.
        record_timeline: keep what this rank did when, for `timeline()` and `measured_bubble()`.
        check_numerics: raise at the first NaN or infinity that leaves a stage.
        seed: draw random numbers from a generator seeded anew for every stage and microbatch, so that dropout does not
            depend on the schedule.
    """

    timeout: float | datetime.timedelta | None = None
    record_timeline = False
    check_numerics = False
    seed: int | None = None

    _stages: list[_PipelineStageBase]
    _backward_requires_autograd = True
    # The engine's table; `pipeline_order` is made from it when asked for, and replaces it when set.
    _engine_table: _C.Schedule | None = None
    _pipeline_order: Table | None = None

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ):
        if n_microbatches < 1:
            raise InvalidValue(f"a step cannot have {n_microbatches} microbatches")
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self.scale_grads = scale_grads
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._has_backward = loss_fn is not None
        self._run: Run | None = None

    def _take_loss_of_model(self, stages: list[_PipelineStageBase]) -> None:
        """A model that was cut with a loss in it needs no loss function."""
        info = getattr(stages[0], "pipe_info", None)
        if self._loss_fn is None and info is not None and info.has_loss_and_backward:
            index = info.table.loss_output
            self._loss_fn = lambda output, target: output if isinstance(output, torch.Tensor) else output[index]
            self._has_backward = True

    @property
    def pipeline_order(self) -> Table | None:
        """For every rank its actions, None where it waits if every action took a tick."""
        if self._pipeline_order is None and self._engine_table is not None:
            self._pipeline_order = self._order_of(self._engine_table)
        return self._pipeline_order

    @pipeline_order.setter
    def pipeline_order(self, actions: Table | None) -> None:
        self._pipeline_order, self._engine_table, self._run = actions, None, None

    def _order_of(self, table: _C.Schedule) -> Table:
        return _table(table.with_idle_ticks())

    def _table_to_run(self) -> _C.Schedule:
        if self._engine_table is not None and self._engine_table.two_way:
            return self._engine_table
        actions = getattr(self, "pipeline_order_with_comms", None) or self.pipeline_order
        if not actions:
            raise InvalidSchedule("the schedule has no actions")
        return _schedule(_computes(actions), None, self._n_microbatches, type(self).__name__)

    def step(
        self,
        *args,
        target=None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs,
    ):
        """Runs a batch: cuts it into microbatches, and trains on it if there is a loss function.

        Every rank gives what its own stages need: `args` on the rank of the first stage, `target` on the rank of the
        last. `losses` is filled with a loss a microbatch there, and the outputs are answered as one; elsewhere None.

        Raises `plumb.Error` that names rank and action if a stage fails; every other rank raises one that names this
        rank and repeats what it said.
        """
        if self._has_backward and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise Error("step() needs gradients to be enabled for its backward; use eval() under torch.no_grad()")
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(
            arg_mbs, kwarg_mbs, self._split_target(target), losses, return_outputs, loss_kwargs=loss_kwargs
        )
        for stage in self._stages:
            if stage.is_last and return_outputs and stage.output_chunks:
                return self._merge_outputs(stage.output_chunks)
        return None

    def eval(self, *args, target=None, losses: list | None = None, **kwargs):
        """Forwards only, without autograd. Losses where a target is given."""
        has_backward, self._has_backward = self._has_backward, False
        try:
            return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = has_backward

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """A step on a batch that is cut already."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        if self._run is None:
            self._run = Run(
                self._table_to_run(),
                self._stages,
                self._loss_fn,
                timeout=group_timeout(self.timeout, self._stages[0].group),
                scale_grads=self.scale_grads,
                record_timeline=self.record_timeline,
                check_numerics=self.check_numerics,
                seed=self.seed,
            )
        found = self._run.step(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {}, return_outputs, self._has_backward)
        if losses is not None and any(stage.is_last for stage in self._stages):
            losses[:] = found

    def timeline(self) -> list[tuple[int, str, float, float, float]]:
        """The last step on all ranks: (rank, action, seconds when it began to wait, to run, and ended). All ranks must
        ask; `record_timeline` must be set."""
        if self._run is None or not self.record_timeline:
            raise Error("no time line was recorded: set record_timeline before the first step")
        return self._run.gather_timeline()

    def draw_timeline(self, filename: str | None, costs: dict[str, Any] | None = None) -> None:
        """Draws the last step: a name that ends in ".json" becomes a trace for Chrome and Perfetto, any other a picture
        (SVG), with the table as simulated below it if `costs` in seconds are given (see `search_schedule`). All ranks
        must ask; those with a file name write it."""
        events = self.timeline()
        if filename is None:
            return
        if os.fspath(filename).lower().endswith(".json"):
            traced = [
                {"name": a, "ph": "X", "pid": 0, "tid": rank, "ts": start * 1e6, "dur": (end - start) * 1e6}
                for rank, a, _, start, end in events
            ]
            text = json.dumps({"traceEvents": traced})
        else:
            text = _C.timeline_svg(events, self._table_to_run(), costs or {})
        with open(filename, "w") as file:
            file.write(text)

    def measured_bubble(self) -> float:
        """The share of the last step in which ranks did not compute. All ranks must ask."""
        return _C.measured_bubble(self.timeline())

    def _check_inputs(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None) -> tuple[list, list]:
        for what, values in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if values is None:
                continue
            if not isinstance(values, list):
                raise InvalidType(f"{what} must be a list, not a {type(values).__name__}")
            if len(values) != self._n_microbatches:
                raise InvalidValue(f"the schedule has {self._n_microbatches} microbatches, {what} {len(values)}")
        if losses is not None and not isinstance(losses, list):
            raise InvalidType(f"losses must be a list, not a {type(losses).__name__}")
        n = self._n_microbatches
        return [()] * n if arg_mbs is None else arg_mbs, [{}] * n if kwarg_mbs is None else kwarg_mbs

    def _split_inputs(self, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[list, list]:
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _split_target(self, target) -> list | None:
        if target is None:
            return None
        if isinstance(target, torch.Tensor):
            return list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        return [args[0] for args in split_args_kwargs_into_chunks((target,), None, self._n_microbatches)[0]]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return merge_chunks(output_chunks, self._output_merge_spec)


def _computes(actions: Table) -> Table:
    return {rank: [a for a in row if a is not None and a.is_compute_op] for rank, row in actions.items()}


class PipelineScheduleSingle(_PipelineSchedule):
    """Schedules with one stage a rank."""

    _name: str | None = None

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ):
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        self._stage = stage
        self._take_loss_of_model([stage])
        self._stages = [stage]
        self._num_stages = stage.num_stages
        if self._name is not None:
            self._engine_table = _C.make_schedule(self._name, self._num_stages, n_microbatches)

    def _order_of(self, table: _C.Schedule) -> Table:
        return {rank: _add_reduce_grad(row, self._n_microbatches) for rank, row in _table(table).items()}

    def _get_pipeline_order(self) -> Table | None:
        return self.pipeline_order


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


class PipelineScheduleMulti(_PipelineSchedule):
    """Schedules with any number of stages a rank.

    Give a table by setting `pipeline_order` ({rank: [action or None, ...]}) in a subclass, or with `_load_csv`. Stages
    are where the table runs them.
    """

    _name: str | None = None

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        stage_index_to_group_rank: dict[int, int] | None = None,
    ):
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        if not isinstance(stages, (list, tuple)) or not stages:
            raise InvalidType("stages must be a list of the stages of this rank")
        self._take_loss_of_model(stages)
        self._stages = list(stages)
        self._num_stages = stages[0].num_stages
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self.n_local_stages = len(stages)
        self._backward_requires_autograd = backward_requires_autograd
        self._set_ranks(
            stage_index_to_group_rank or {stage: stage % self.pp_group_size for stage in range(self._num_stages)}
        )
        self._pipeline_order = {}
        if self._name is not None:
            self._make()

    def _make(self) -> None:
        traits = _C.schedule_traits(self._name)
        per_rank = self.n_local_stages // 2 if traits["two_way"] else self.n_local_stages
        if not traits["min_stages_per_rank"] <= per_rank <= traits["max_stages_per_rank"] or (
            traits["two_way"] and self.n_local_stages != 2
        ):
            count = 2 if traits["two_way"] else traits["min_stages_per_rank"]
            raise InvalidValue(f"{self._name} runs {count} stages on every rank, and {self.n_local_stages} were given")
        if traits["splits_backward"]:
            _check_torch_compile_compatibility(self._stages, type(self).__name__)
        self._take(_C.make_schedule(self._name, self.pp_group_size, self._n_microbatches, per_rank))

    def _take(self, table: _C.Schedule) -> None:
        if table.num_ranks != self.pp_group_size or table.num_stages != self._num_stages:
            raise InvalidSchedule(
                f"the schedule {table.name} is for {table.num_ranks} ranks and {table.num_stages} stages, and there are "
                f"{self.pp_group_size} and {self._num_stages}"
            )
        self._engine_table, self._pipeline_order, self._run = table, None, None
        self._set_ranks(dict(enumerate(table.ranks)))

    def _set_ranks(self, ranks: dict[int, int]) -> None:
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks

    def _validate_and_set_stage_mapping(self, actions: Table) -> None:
        self._set_ranks(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    def _dump_csv(self, filename: str) -> None:
        _write_csv(self.pipeline_order, filename)

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Takes the table of a file: a line a rank, a cell an action. '#' begins a comment."""
        if format != "compute_only":
            raise InvalidSchedule(f'this schedule reads tables of format "compute_only", not "{format}"')
        actions = _read_csv(filename)
        self._validate_and_set_stage_mapping(actions)
        self.pipeline_order = actions


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """Runs any table, from a file or from `_prepare_schedule_with_comms`.

    Where receives stand in a table does not matter to the run: they are always posted ahead.
    """

    def __init__(self, *args, defer_pp_recv: bool = False, **kwargs):
        self._defer_pp_recv = defer_pp_recv
        self._with_comms: Table | None = None
        super().__init__(*args, **kwargs)

    @property
    def pipeline_order_with_comms(self) -> Table:
        """The table with sends, receives and what surrounds use."""
        if self._with_comms is None and self.pipeline_order:
            if self._engine_table is not None and self._engine_table.two_way:
                lowered = self._engine_table.add_messages_in_turns()
                self._with_comms = _table(lowered.defer_receives() if self._defer_pp_recv else lowered)
            else:
                self._with_comms = self._lower(self.pipeline_order)
        return self._with_comms or {}

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, actions: Table) -> None:
        self._with_comms, self._run = actions, None

    def _table_to_run(self) -> _C.Schedule:
        # Messages follow from the table, so that it need not be lowered here.
        if self._with_comms:
            return _schedule(_computes(self._with_comms), None, self._n_microbatches, type(self).__name__)
        if self._engine_table is not None and self._pipeline_order is None:
            return self._engine_table
        actions = self.pipeline_order
        if not actions:
            raise InvalidSchedule("the schedule has no actions: load a table before the first step")
        return _schedule(_computes(actions), None, self._n_microbatches, type(self).__name__)

    def _lower(self, actions: Table) -> Table:
        rows = {
            rank: _add_reduce_grad(_add_unshard_reshard(row), self._n_microbatches) for rank, row in actions.items()
        }
        lowered = _add_send_recv(rows, self.stage_index_to_group_rank.__getitem__, self._num_stages)
        if self._defer_pp_recv:
            lowered = _defer_recv_ops(lowered, self.stage_index_to_group_rank.__getitem__)
        return lowered

    def _prepare_schedule_with_comms(
        self, actions: Table, format: Literal["compute_only", "compute_comms"] = "compute_only"
    ) -> None:
        """Takes a table: one that only computes, which gets its messages here, or one that has them."""
        if format not in ("compute_only", "compute_comms"):
            raise InvalidValue(f'the format of a table is "compute_only" or "compute_comms", not "{format}"')
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_only":
            for rank, row in actions.items():
                for position, action in enumerate(row):
                    if action is not None and not action.is_compute_op:
                        raise InvalidValue(
                            f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, "
                            f"position {position}"
                        )
            self._with_comms = self._lower(actions)
        else:
            if any(action is None for row in actions.values() for action in row):
                raise InvalidSchedule("a table with messages has no idle entries")
            problems = _schedule(actions, None, self._n_microbatches).check(False, False)
            if problems != "ok":
                raise InvalidSchedule(f"{problems}\n\nFull pipeline schedule:\n{_format_pipeline_order(actions)}")
            self._with_comms = {rank: list(row) for rank, row in actions.items()}
        self._run = None

    _load_actions = _prepare_schedule_with_comms

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        actions = _read_csv(filename)
        if format == "compute_comms":
            actions = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
        self._prepare_schedule_with_comms(actions, format)
        if format == "compute_only":
            self._pipeline_order, self._engine_table = actions, None

    def _dump_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms") -> None:
        _write_csv(self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms, filename)

    def _simulate(self) -> Table:
        return _simulate_comms_compute(
            self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages
        )

    def register_custom_function(self, computation_type: _ComputationType, custom_function: Callable) -> None:
        """The engine runs its actions itself and cannot be told to run others."""
        raise Error(
            f"actions of kind {computation_type.value} cannot be replaced by a function; wrap the stage's module, or "
            "give the stage a dw_builder for its weight gradients"
        )


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
    """Two stages a rank in a V, forwards and backwards of different microbatches in pairs."""

    _name = "DualPipeV"


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
            self._prepare_schedule_with_comms(_computes(table))
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
    found = [base] if base._name is not None and base.__module__ == __name__ else []
    return found + [cls for sub in base.__subclasses__() for cls in _named(sub)]


def _read_csv(filename: str) -> Table:
    with open(filename) as file:
        return _table(_C.parse_schedule_csv(file.read(), os.fspath(filename)))


def _write_csv(actions: Table, filename: str) -> None:
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


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    dynamo = sys.modules.get("torch._dynamo")  # loaded once something was compiled
    for stage in stages if dynamo is not None else []:
        module = getattr(stage, "submod", None)
        if isinstance(module, torch.nn.Module) and any(isinstance(m, dynamo.OptimizedModule) for m in module.modules()):
            raise Error(
                f"{schedule_name} halves the backward, which torch.compile does not support; stage "
                f"{stage.stage_index} is compiled: use a schedule with full backwards, such as 1F1B"
            )
