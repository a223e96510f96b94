"""The base classes of all schedules: those with one stage a rank, and those with any number, which run any table."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import threading
from collections.abc import Callable, Container
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import _C
from .._arguments import checked
from .._errors import Error, ErrorKind
from .._state import is_compiled
from ._actions import BACKWARD_INPUT, RESHARD, UNSHARD, Table, _check, _row, _schedule, _table, _validate_schedule
from ._run import CustomFunctions, Run, group_timeout, prepare_own, running
from ._utils import InvalidSchedule, InvalidType, InvalidValue
from .microbatch import TensorChunkSpec, _split_tensor, bounds, check_lengths, merge_chunks, split_into_chunks
from .stage import _PipelineStageBase

_OPTIONS = ("scale_grads", "record_timeline", "check_numerics", "seed", "first_step", "gradient_groups")  # the engine's


class _PipelineSchedule(CustomFunctions):
    """The base class of all schedules.

    Arguments of every schedule:
        stages: this rank's stage (`stage`), or the list of its stages if the schedule may have several on a rank.
        n_microbatches: the number of parts that ``step()`` cuts a batch into.
        loss_fn: ``loss_fn(output, target, **loss_kwargs)`` returns one number a microbatch. None: ``step()`` runs forwards
            only.
        args_chunk_spec, kwargs_chunk_spec: how positional and keyword arguments are cut (`TensorChunkSpec`). None: tensors
            along dimension 0.
        output_merge_spec: how outputs of microbatches become one. None: as inputs are cut.
        scale_grads: the loss is a mean over the microbatch's rows: gradients become those of the mean over the batch, also
            where microbatches differ in size. False: they are summed.

    Gradients that are there before a step stay and are added to.

    Attributes, to be set before the first step:
        timeout: seconds (or a timedelta) to wait for another rank; None: the group's own if it was set, else 60.
        record_timeline: keep what this rank did when, for `timeline()` and `measured_bubble()`.
        check_numerics: raise at the first NaN or infinity that leaves a stage.
        seed: draw random numbers from a generator seeded anew for every step, microbatch and random node of a stage's
            graph, so that dropout does not depend on the schedule, the cut and the replicas.
        first_step: the number of the first step for `seed`; of a run that is resumed, how many steps and evaluations
            there were.
        gradient_groups: microbatches are summed in this many groups, and the groups' sums in a binary tree: the same bits
            for every number of replicas that divides it. 0: a group for each replica.
    """

    timeout: float | datetime.timedelta | None = None
    record_timeline: bool = False
    check_numerics: bool = False
    seed: int | None = None
    first_step: int = 0
    gradient_groups: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Says in ``help()`` of every schedule what it shares with all."""
        super().__init_subclass__(**kwargs)
        shared = inspect.cleandoc(_PipelineSchedule.__doc__ or "").partition("\n\n")[2]
        cls.__doc__ = "\n\n".join(filter(None, [inspect.cleandoc(cls.__doc__ or ""), shared]))

    _evaluates = 0  # the thread whose eval() calls step()
    _rows: list[int] | None = None  # one number a microbatch, where a whole batch was cut here

    _name: str | None = None  # name for _C.make_schedule(); None: it is not made from a name
    _stages: list[_PipelineStageBase]
    _backward_requires_autograd = True
    # The engine's table; `pipeline_order` is made from it when asked for, and replaces it when set.
    _engine_table: _C.Schedule | None = None
    _pipeline_order: Table | None = None

    def _begin(
        self, stages: list, n_microbatches: int, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
    ) -> None:
        if wrong := next((type(s).__name__ for s in stages if not hasattr(s, "num_stages")), None):
            raise InvalidType(f"a schedule takes a stage, or a list of stages if it has several a rank, not a {wrong}")
        if n_microbatches < 1:
            raise InvalidValue(f"a step cannot have {n_microbatches} microbatches")
        self._n_microbatches, self._loss_fn, self.scale_grads = n_microbatches, loss_fn, scale_grads
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self._has_backward, self._run = loss_fn is not None, None  # and the engine's pipeline, from the first step on
        self._begin_functions()
        self._stages, self._num_stages = stages, stages[0].num_stages
        # A model that was cut with a loss in it needs no loss function.
        info = getattr(stages[0], "pipe_info", None)
        if self._loss_fn is None and info is not None and info.has_loss_and_backward:
            index, self._has_backward = info.table.loss_output, True
            self._loss_fn = lambda output, target: output if isinstance(output, torch.Tensor) else output[index]

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
        return self._runnable(self.pipeline_order)

    def _runnable(self, actions: Table | None) -> _C.Schedule:
        """Returns the actions that compute, and others that functions stand for."""
        if not actions:
            raise InvalidSchedule("the schedule has no actions", remedy="load a table before the first step")
        return _schedule(compute_actions(actions, self._functions), None, self._n_microbatches, type(self).__name__)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Runs a batch: cuts it into microbatches, and trains on it if there is a loss function.

        Every rank gives what its own stages need: `args` on the rank of the first stage, `target` on the rank of the
        last, which weighs microbatches of other sizes by the rows of its target: without one, give it `args`, too. `losses` is filled with a loss a microbatch there, and the outputs are returned as one; elsewhere None.
        A batch that is cut already is given as `arg_mbs` (tuples), `kwarg_mbs` (dicts) and `target_mbs`, one for each
        microbatch, instead.

        `finalize_gradients` False: gradients of sharded modules (`fully_shard`) stay unreduced and are added to by the
        next step; ``.grad`` is complete after one with True. Others' are complete after every step.

        Raises `plumb.Error` that names rank and action if a stage fails; every other rank raises one that names this
        rank and repeats what it said.
        """
        if self._has_backward and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise Error(
                "step() requires gradients to be enabled for its backward",
                kind=ErrorKind.InvalidState,
                remedy="eval() under torch.no_grad()",
            )
        whole = (args, kwargs, target)
        microbatches = (arg_mbs, kwarg_mbs, target_mbs)
        with contextlib.nullcontext() if self._evaluates == threading.get_ident() else running(self._stages):
            self._evaluates = 0
            return self._step_batch(whole, microbatches, losses, return_outputs, loss_kwargs, finalize_gradients)

    def _step_batch(self, whole_batch, microbatches, losses, return_outputs, loss_kwargs, finalize_gradients) -> Any:
        (args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs) = whole_batch, microbatches
        if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
            chunk_specs = self._args_chunk_spec, self._kwargs_chunk_spec
            arg_mbs, kwarg_mbs, lengths = split_into_chunks(args, kwargs, self._n_microbatches, *chunk_specs)
            target_mbs = self._split_target(target)
            names = ["an input"] * len(lengths)
            if isinstance(target, torch.Tensor) and lengths:
                lengths.append(len(target))
                names.append("the target")
            check_lengths(lengths, len(arg_mbs), names)
            if lengths:
                self._rows = [end - start for start, end in bounds(lengths[0], len(arg_mbs))]
        elif args or kwargs or target is not None:
            whole = "a positional input" if args else f"'{next(iter(kwargs))}'" if kwargs else "target"
            raise InvalidValue(
                f"the step is given microbatches, and {whole} for the whole batch",
                remedy="all of it whole, or all of it as arg_mbs, kwarg_mbs and target_mbs",
            )
        for stage in self._stages:
            stage.has_backward, stage.finalizes = self._has_backward, finalize_gradients
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)
        for stage in self._stages:
            if stage.is_last and return_outputs and stage.output_chunks:
                return merge_chunks(stage.output_chunks, self._output_merge_spec)
        return None

    def eval(self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Forwards only, without autograd. Losses where a target is given. Microbatches as for `step`."""
        with running(self._stages):
            has_backward, self._has_backward = self._has_backward, False
            self._evaluates = threading.get_ident()
            try:
                return self.step(*args, target=target, losses=losses, **kwargs)
            finally:
                self._has_backward, self._evaluates = has_backward, 0

    def _step_microbatches(
        self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, return_outputs=True, loss_kwargs=None
    ) -> None:
        """A step on a batch that is cut already."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        if self._run is None:
            own = prepare_own(self._stages, arg_mbs, kwarg_mbs, self._has_backward)
            if own and not any(a is not None for row in (self.pipeline_order or {}).values() for a in row):
                return
            if own:
                raise own
            self._run = self._engine_run()
        self._refuse_late_options(self._run)
        found = self._run.step(
            self, arg_mbs, kwarg_mbs, target_mbs, loss_kwargs or {}, return_outputs, self._has_backward
        )
        if losses is not None and any(stage.is_last for stage in self._stages):
            losses[:] = found

    def _refuse_late_options(self, run: Run) -> None:
        for name, used in run.options.items():
            if (now := getattr(self, name)) != used:
                raise Error(
                    f"{name} is {now!r} by now, and the schedule began with {used!r}",
                    kind=ErrorKind.InvalidState,
                    remedy="set it before the first step or eval(), or make another schedule of the stages",
                )

    def _engine_run(self) -> Run:
        return Run(
            self._table_to_run(),
            self._stages,
            timeout=group_timeout(self.timeout, self._stages[0].group),
            **{name: getattr(self, name) for name in _OPTIONS},
            functions=self._functions,
        )

    def gather_stage_states(self) -> list[dict[str, torch.Tensor]]:
        """Returns the ``state_dict`` of every stage, from the ranks that run them: for `Pipe.merge_state_dict` and the
        like. All ranks must ask. Tensors are copies on the CPU, parameters of sharded modules whole."""
        parts: list[Any] = [{stage.stage_index: stage.state_on_cpu() for stage in self._stages}]
        stage = self._stages[0]
        if stage.group_size > 1:
            parts *= stage.group_size
            dist.all_gather_object(parts, parts[0], group=stage.group)
        states = {index: state for part in parts for index, state in part.items()}
        return [states[index] for index in range(self._num_stages)]

    def timeline(self) -> list[tuple[int, str, float, float, float]]:
        """Returns the last step on all ranks: (rank, action, seconds when it began to wait, to run, and ended). All
        ranks must ask; `record_timeline` must be set."""
        return [event[:5] for event in self._events()]

    def bytes_sent(self) -> dict[tuple[int, str], int]:
        """Bytes that each action of the last step sent to other ranks, by (rank, action). As `timeline`."""
        return {event[:2]: event[5] for event in self._events()}

    def _events(self) -> list[tuple]:
        if self._run is None or not self.record_timeline:
            raise Error("no time line was recorded: set record_timeline before the first step", kind=ErrorKind.InvalidState)
        return self._run.pipeline.gather_timeline()

    def draw_timeline(self, filename: str | None, costs: dict[str, Any] | None = None) -> None:
        """Draws the last step: a name that ends in ".json" becomes a trace for Chrome and Perfetto, any other a picture
        (SVG), with the table as simulated below it if `costs` in seconds are given (see `search_schedule`). All ranks
        must ask; those with a file name write it."""
        events = self._events()
        if filename is not None:
            trace = os.fspath(filename).lower().endswith(".json")
            text = _C.timeline_trace(events) if trace else _C.timeline_svg(events, self._table_to_run(), costs or {})
            _C.write_file(os.fspath(filename), text)

    def measured_bubble(self) -> float:
        """Returns the share of the last step in which ranks did not compute. All ranks must ask."""
        return _C.measured_bubble(self._events())

    def _check_inputs(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None) -> tuple[list, list]:
        given = (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict), ("target_mbs", target_mbs, object))
        for what, values, kind in given:
            if values is None:
                continue
            if not isinstance(values, list):
                raise InvalidType(f"{what} must be a list, not a {type(values).__name__}")
            if len(values) != self._n_microbatches:
                raise InvalidValue(f"Expecting {self._n_microbatches} {what}, one a microbatch, but got {len(values)}")
            for i, value in enumerate(values):
                if not isinstance(value, kind):
                    raise InvalidType(f"{what}[{i}] is a {type(value).__name__}, not a {kind.__name__}")
        if losses is not None and not isinstance(losses, list):
            raise InvalidType(f"losses must be a list, not a {type(losses).__name__}")
        n = self._n_microbatches
        return [()] * n if arg_mbs is None else arg_mbs, [{}] * n if kwarg_mbs is None else kwarg_mbs

    def _split_target(self, target) -> list | None:
        if target is None or isinstance(target, torch.Tensor):
            return None if target is None else _split_tensor(target, TensorChunkSpec(0), self._n_microbatches)
        return [args[0] for args in split_into_chunks((target,), None, self._n_microbatches)[0]]


def compute_actions(actions: Table, others: Container = ()) -> Table:
    """Returns the actions that compute, and those of `others` kinds."""
    return {
        rank: [a for a in row if a is not None and (a.is_compute_op or a.computation_type in others)]
        for rank, row in actions.items()
    }


@checked
class PipelineScheduleSingle(_PipelineSchedule):
    """Schedules with one stage a rank."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ):
        chunks = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._begin([stage], n_microbatches, loss_fn, *chunks, scale_grads)
        self._stage = stage
        if self._name is not None:
            self._engine_table = _C.make_schedule(self._name, self._num_stages, n_microbatches)

    def _order_of(self, table: _C.Schedule) -> Table:
        return {rank: _row(_C.with_surroundings(row, 0, True)) for rank, row in _table(table).items()}


def _check_torch_compile_compatibility(stages: list[_PipelineStageBase], schedule_name: str) -> None:
    for stage in stages:
        module = getattr(stage, "submod", None)
        if isinstance(module, torch.nn.Module) and any(map(is_compiled, module.modules())):
            raise Error(
                f"{schedule_name} halves the backward, which torch.compile does not support; stage "
                f"{stage.stage_index} is compiled: use a schedule with full backwards, such as 1F1B"
            )


@checked
class PipelineScheduleMulti(_PipelineSchedule):
    """Schedules with any number of stages a rank.

    Give a table by setting `pipeline_order` ({rank: [action or None, ...]}) in a subclass, with `_load_csv`, or with
    `_prepare_schedule_with_comms`. Stages are where the table runs them. Where receives stand in a table does not matter
    to the run: they are always posted ahead. Whether the backward is halved is the table's: `use_full_backward` True makes
    a step refuse a table that halves it. Functions in the place of UNSHARD and RESHARD are called so that `max_active_stages`
    of a rank are whole at a time; without such functions its sharded modules stay gathered until their last gradient.
    Taken for compatibility: `defer_pp_recv`, and for the named schedules `unshard_lookahead`, `defer_reduce_grad_wait` and
    `max_outstanding_sends`, which change no result.
    """

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        stage_index_to_group_rank: dict[int, int] | None = None,
        *,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
    ):
        if not isinstance(stages, (list, tuple)) or not stages:
            raise InvalidType("stages must be a list of the stages of this rank")
        if type(max_active_stages) is not int or max_active_stages < 1:
            raise InvalidValue(f"max_active_stages is {max_active_stages!r}, not a number of stages")
        chunks = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._begin(list(stages), n_microbatches, loss_fn, *chunks, scale_grads)
        self._defer_pp_recv, self._max_active_stages = defer_pp_recv, max_active_stages
        self.pp_group_size, self.rank, self.n_local_stages = stages[0].group_size, stages[0].group_rank, len(stages)
        self._backward_requires_autograd, self._use_full_backward = backward_requires_autograd, use_full_backward
        self._set_ranks(stage_index_to_group_rank or {s: s % self.pp_group_size for s in range(self._num_stages)})
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
            raise InvalidValue(
                f"{self._name} runs {fewest} stages on every rank, and {here} were given",
                remedy=f"{fewest} stages for each rank, or ScheduleInterleaved1F1B, which runs any number",
            )
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

    def _table_to_run(self) -> _C.Schedule:
        around_use = self._functions.keys() & {UNSHARD, RESHARD}
        if not around_use and self._engine_table is not None and self._pipeline_order is None:
            return self._engine_table
        order = self.pipeline_order
        if around_use and order and all(a is None or a.is_compute_op for row in order.values() for a in row):
            order = {rank: _row(_C.with_surroundings(row, self._max_active_stages, True)) for rank, row in order.items()}
        return self._runnable(order)

    def _prepare_schedule_with_comms(
        self, actions: Table, format: Literal["compute_only", "compute_comms"] = "compute_only"
    ) -> None:
        """Takes a table: one that only computes, or one with messages, in whose place a step makes its own."""
        if format not in ("compute_only", "compute_comms"):
            raise InvalidValue(f'the format of a table is "compute_only" or "compute_comms", not "{format}"')
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_only":
            for rank, position, action in ((rank, i, a) for rank, row in actions.items() for i, a in enumerate(row) if a):
                if not action.is_compute_op:
                    raise InvalidValue(
                        f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, "
                        f"position {position}"
                    )
        else:
            if any(action is None for row in actions.values() for action in row):
                raise InvalidSchedule("a table with messages has no idle entries")
            _check(_schedule(actions, None, self._n_microbatches), False, False)
        self.pipeline_order = {rank: list(row) for rank, row in actions.items()}

    _load_actions = _prepare_schedule_with_comms

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Takes the table of a file: a line a rank, a cell an action. '#' begins a comment."""
        actions = _table(_C.parse_schedule_csv(_C.read_file(os.fspath(filename)), os.fspath(filename)))
        if format == "compute_comms":
            actions = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
        self._prepare_schedule_with_comms(actions, format)


_PipelineScheduleRuntime = PipelineScheduleMulti  # torch has two
