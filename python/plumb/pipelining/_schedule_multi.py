"""Schedules with any number of stages a rank, and those that run any table."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from .. import _C
from .._C import Error
from ._actions import BACKWARD_INPUT, RESHARD, UNSHARD, Table, _schedule, _table, _validate_schedule
from ._errors import InvalidSchedule, InvalidType, InvalidValue
from ._run import Run
from ._schedule_base import _PipelineSchedule
from .microbatch import TensorChunkSpec
from .stage import _PipelineStageBase


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    dynamo = sys.modules.get("torch._dynamo")  # loaded once something was compiled
    for stage in stages if dynamo is not None else []:
        module = getattr(stage, "submod", None)
        if isinstance(module, torch.nn.Module) and any(isinstance(m, dynamo.OptimizedModule) for m in module.modules()):
            raise Error(
                f"{schedule_name} halves the backward, which torch.compile does not support; stage "
                f"{stage.stage_index} is compiled: use a schedule with full backwards, such as 1F1B"
            )


class PipelineScheduleMulti(_PipelineSchedule):
    """Schedules with any number of stages a rank.

    Give a table by setting `pipeline_order` ({rank: [action or None, ...]}) in a subclass, with `_load_csv`, or with
    `_prepare_schedule_with_comms`. Stages are where the table runs them. Where receives stand in a table does not matter
    to the run: they are always posted ahead. Whether the backward is halved is the table's: `use_full_backward` True makes
    a step refuse a table that halves it.
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
        *,
        defer_pp_recv: bool = False,
    ):
        self._defer_pp_recv = defer_pp_recv
        super().__init__(n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        if not isinstance(stages, (list, tuple)) or not stages:
            raise InvalidType("stages must be a list of the stages of this rank")
        self._take_stages(list(stages))
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self.n_local_stages = len(stages)
        self._backward_requires_autograd = backward_requires_autograd
        self._use_full_backward = use_full_backward
        self._set_ranks(
            stage_index_to_group_rank or {stage: stage % self.pp_group_size for stage in range(self._num_stages)}
        )
        self._pipeline_order = {}
        if self._name is not None:
            self._make()

    def _make(self) -> None:
        """Takes the engine's table of this name."""
        traits = _C.schedule_traits(self._name)
        fewest, most, here = traits["min_stages_per_rank"], traits["max_stages_per_rank"], self.n_local_stages
        if traits["bidirectional"]:  # every stage is on two ranks
            fewest, most = 2 * fewest, 2 * most
        if not fewest <= here <= most:
            raise InvalidValue(f"{self._name} runs {fewest} stages on every rank, and {here} were given")
        if traits["splits_backward"]:
            _check_torch_compile_compatibility(self._stages, type(self).__name__)
        per_rank = here // 2 if traits["bidirectional"] else here
        self._take(_C.make_schedule(self._name, self.pp_group_size, self._n_microbatches, per_rank))

    def _take(self, table: _C.Schedule) -> None:
        if table.num_ranks != self.pp_group_size or table.num_stages != self._num_stages:
            raise InvalidSchedule(
                f"the schedule {table.name} is for {table.num_ranks} ranks and {table.num_stages} stages, and there are "
                f"{self.pp_group_size} and {self._num_stages}"
            )
        self._engine_table, self._pipeline_order, self._run = table, None, None
        self._set_ranks(dict(enumerate(table.ranks)))

    def _engine_run(self) -> Run:
        rows = self._table_to_run().rows if self._use_full_backward else []
        if BACKWARD_INPUT.value in {entry[1] for row in rows for entry in row if entry is not None}:
            raise InvalidValue(
                f"use_full_backward is True, and the table of {type(self).__name__} halves the backward",
                remedy="a table with full backwards, such as Interleaved1F1B, or leave use_full_backward out",
            )
        return super()._engine_run()

    def _set_ranks(self, ranks: dict[int, int]) -> None:
        self.stage_index_to_group_rank = ranks
        for stage in self._stages:
            stage.stage_index_to_group_rank = ranks

    def _validate_and_set_stage_mapping(self, actions: Table) -> None:
        self._set_ranks(_validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches))

    @property
    def pipeline_order_with_comms(self) -> Table:
        """The table with sends, receives, UNSHARD, RESHARD and REDUCE_GRAD."""
        if self._with_comms is None and self.pipeline_order:
            table = self._engine_table
            if table is not None and table.bidirectional:
                self._with_comms = _table(table.torch_lowering(reduce_grad=False, defer_receives=self._defer_pp_recv))
            else:
                self._with_comms = self._lower(self.pipeline_order)
        return self._with_comms or {}

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, actions: Table) -> None:
        self._with_comms, self._run = actions, None

    def _table_to_run(self) -> _C.Schedule:
        # Messages follow from the table, so that it need not be lowered here.
        around_use = self._functions.keys() & {UNSHARD, RESHARD}
        if not self._with_comms and not around_use and self._engine_table is not None and self._pipeline_order is None:
            return self._engine_table
        return self._runnable(self._with_comms or (self.pipeline_order_with_comms if around_use else self.pipeline_order))

    def _with_ranks(self, actions: Table) -> _C.Schedule:
        return _schedule(actions, [rank for _, rank in sorted(self.stage_index_to_group_rank.items())])

    def _lower(self, actions: Table) -> Table:
        try:
            lowered = self._with_ranks(actions).torch_lowering(max_unsharded=3, defer_receives=self._defer_pp_recv)
        except Error as error:
            raise InvalidSchedule(f"Malformed compute schedule: {error}") from None
        return _table(lowered)

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
                raise InvalidSchedule(problems)
            self._with_comms = {rank: list(row) for rank, row in actions.items()}
        self._run = None

    _load_actions = _prepare_schedule_with_comms

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Takes the table of a file: a line a rank, a cell an action. '#' begins a comment."""
        actions = _table(_C.parse_schedule_csv(pathlib.Path(filename).read_text(), os.fspath(filename)))
        if format == "compute_comms":
            actions = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
        self._prepare_schedule_with_comms(actions, format)
        if format == "compute_only":
            self._pipeline_order, self._engine_table = actions, None

    def _dump_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_comms") -> None:
        actions = self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms
        lines = [",".join("" if action is None else str(action) for action in row) + "\n" for row in actions.values()]
        pathlib.Path(filename).write_text("".join(lines))

    def _simulate(self) -> Table:
        return _table(self._with_ranks(self.pipeline_order_with_comms).simulate_send_recv())


_PipelineScheduleRuntime = PipelineScheduleMulti  # torch has two
