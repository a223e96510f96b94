"""A schedule's stages at work: what the engine calls in a step."""

from __future__ import annotations

import datetime
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from ._actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, REDUCE_GRAD, _Action, _ComputationType
from ._chunks import EngineStage, own_arguments
from ._data_parallel import replicas_of
from ._hooks import _PipelineContext, hooks_of
from ._values import detached
from .stage import _PipelineStageBase

_TORCHS_TIMEOUT = datetime.timedelta(minutes=30)


def group_timeout(given, group: dist.ProcessGroup | None) -> float:
    """Seconds to wait for another rank: as given, else as the group was made with, else 60."""
    if given is None and dist.is_available() and dist.is_initialized():
        try:
            group = group or dist.distributed_c10d._get_default_group()
            own = group._get_backend(torch.device("cpu")).options._timeout
            given = own if own != _TORCHS_TIMEOUT else None
        except (RuntimeError, AttributeError):
            given = None
    if given is None:
        return 60.0
    return given.total_seconds() if isinstance(given, datetime.timedelta) else float(given)


def names_of(stages: list) -> dict[int, str]:
    """By id of a parameter: the name under which copies of it are known in the whole pipeline."""
    names: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            own = name if stage.layout is not None else f"stage {stage.stage_index}: {name}"
            names.setdefault(id(parameter), getattr(stage, "tied", {}).get(name, own))
    return names


class _Step:
    """What one step was given, and what came of it."""

    def __init__(self, run: Run, schedule: Any, args, kwargs, targets, loss_kwargs, keep_outputs, train):
        self.run, self.stages, self.driver, self.schedule = run, run.stages, run.driver, schedule
        self.args, self.kwargs, self.targets, self.loss_kwargs = args, kwargs, targets, loss_kwargs
        self.keep_outputs, self.train = keep_outputs, train
        self.context = _PipelineContext(schedule, args, kwargs, targets)
        self.rows = rows_of(args if targets is None else targets)
        self.weights = [n * len(self.rows) / sum(self.rows) for n in self.rows] if schedule.scale_grads else []
        # Of stages cut from a graph, by microbatch: the model's inputs, None for what is not given here.
        cut = run.stages[0].layout is not None
        self.model_inputs = [run.stages[0].model_inputs(*given) for given in zip(args, kwargs)] if cut else []
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.roots: dict[int, torch.Tensor] = {}  # losses, for hooks
        self.failure: BaseException | None = None

    def arguments(self, stage: _PipelineStageBase, microbatch: int) -> tuple[tuple, dict[str, Any]]:
        return self.args[microbatch], own_arguments(stage, self.stages, self.kwargs[microbatch])

    def _loss(self, output: Any, target: Any, microbatch: int, loss_kwargs: dict[str, Any]) -> torch.Tensor | None:
        if self.targets is None and not self.train:
            return None
        try:
            loss = self.schedule._loss_fn(output, target, **loss_kwargs)
        except Exception as error:
            if self.targets is not None or isinstance(error, Error):
                raise
            raise Error(
                f"step() was given no target, and the loss function fails without one: {error}",
                kind=ErrorKind.StructureMismatch,
                remedy="schedule.step(..., target=...) on the rank of the last stage",
            ) from error
        if not isinstance(loss, torch.Tensor):
            raise Error(f"the loss function answered a {type(loss).__name__}, not a tensor")
        if loss.numel() != 1:
            raise Error(
                f"the loss function answered a tensor of shape {list(loss.shape)}, not one number",
                kind=ErrorKind.StructureMismatch,
                remedy='one number a microbatch: loss.mean(), or reduction="mean"',
            )
        self.losses[microbatch] = loss.detach()
        return loss

    def finish(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        """Of the last stage."""
        if self.keep_outputs:
            self.outputs[microbatch] = detached(output)
        if self.schedule._loss_fn is None:
            return []
        target = None if self.targets is None else self.targets[microbatch]
        loss = self._loss(output, target, microbatch, self.loss_kwargs)
        if loss is None or not self.train:
            return []
        if self.run.has_hooks:  # one may begin its backward with it
            self.roots[microbatch] = loss
        return [loss]

    def compute_loss(self, output: Any, target: Any, microbatch: int, loss_kwargs: dict[str, Any] | None) -> None:
        loss = self._loss(output, target, microbatch, loss_kwargs or self.loss_kwargs)
        if loss is not None:
            self.roots[microbatch] = loss
            self.driver.set_loss(microbatch, loss)

    def call(self, function: Callable, action: _Action) -> None:
        """Runs a function in the place of an action."""
        schedule = self.schedule
        for part in action.sub_actions or (action,):
            ops = schedule.fwd_recv_ops if part.computation_type is FORWARD else schedule.bwd_recv_ops
            ops[part.stage_index, part.microbatch_index] = []
        try:
            function(action, self.context)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            schedule.fwd_recv_ops.clear()
            schedule.bwd_recv_ops.clear()
            for stage in self.stages:
                stage.fwd_cache.clear()
                stage.bwd_cache.clear()
            for part in action.sub_actions or (action,):
                if part.computation_type is not FORWARD:
                    self.roots.pop(part.microbatch_index, None)


class Run:
    """The engine's pipeline over Python stages. Blocks until all ranks have made theirs."""

    def __init__(
        self,
        table: _C.Schedule,
        stages: list[_PipelineStageBase],
        timeout: float,
        functions: dict[_ComputationType, Callable] | None = None,
        **options,
    ):
        self.stages = sorted(stages, key=lambda stage: stage.stage_index)
        self.current: _Step | None = None
        self._divisor = table.num_microbatches if options.get("scale_grads") else 1
        layout = self.stages[0].layout or self.stages[0].chain()
        names = names_of(self.stages)
        group = self.stages[0].group
        if group is None and self.stages[0].group_size > 1:
            group = dist.distributed_c10d._get_default_group()
        local = {stage.stage_index: EngineStage(stage, names) for stage in self.stages}
        if len(local) != len(stages):
            raise Error(f"two stages of this rank have the same index: {[stage.stage_index for stage in self.stages]}")
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        this = weakref.ref(self)  # the engine's objects are none for Python's collector
        hooks = {
            point: lambda text, function=function: this().current.call(function, _Action.from_str(text))
            for point, function in hooks_of(self.stages, functions or {}, lambda action, _: this().perform(action)).items()
        }
        self.has_hooks = bool(hooks)
        reduce = REDUCE_GRAD.value
        self._reduces = {i for i in local if (reduce, i) in hooks or (reduce, -1) in hooks}
        self._replicas = None if self._reduces else replicas_of(self.stages)
        counted = [entry[:2] for entry in table.rows[self.stages[0].group_rank] if entry is not None] if hooks else []
        self._backwards = Counter(stage for stage, kind in counted if kind in (FULL_BACKWARD.value, BACKWARD_WEIGHT.value))
        self.pipeline = _C.Pipeline(
            layout, table, local, group, timeout, replicas=self._replicas, hooks=hooks, **options
        )
        self.driver = self.pipeline.driver()

    def step(self, schedule, args, kwargs, targets, loss_kwargs, keep_outputs: bool, train: bool) -> list[torch.Tensor]:
        """Answers this rank's losses; its last stage gets its outputs."""
        step = self.current = schedule._step = _Step(
            self, schedule, args, kwargs, targets, loss_kwargs, keep_outputs, train
        )
        schedule.backward_counter.clear()
        for stage in self.stages:
            stage.chunks, stage._step = len(args), step
        try:
            for stage in self.stages if train else ():
                stage.hold_gradients()
            self.pipeline.run(step.model_inputs, step.rows, train)
            if train:
                for stage in self.stages:
                    stage.recomputed = self.pipeline.recomputed(stage.stage_index)
                    if self._replicas is None and stage.stage_index not in self._reduces:
                        stage.reduce_gradients(self._divisor)
        except Error as error:
            failure = step.failure
            if failure is None or failure is error:
                raise
            if not isinstance(failure, Exception):  # an interrupt is the user's, not the pipeline's
                raise failure from None
            raise error from failure
        finally:
            for stage in self.stages:
                stage.release_gradients()
                stage._step = None
            self.current = schedule._step = None
            step.failure = None
        for stage in self.stages:
            if stage.is_last:
                stage.output_chunks = [step.outputs[m] for m in sorted(step.outputs)]
        return [step.losses[m] for m in sorted(step.losses)]

    def perform(self, action: _Action) -> None:
        """Runs an action of the step that runs by its stages' methods."""
        step, kind, microbatch = self.current, action.computation_type, action.microbatch_index
        for part in action.sub_actions or ():
            self.perform(part)
        stage = next((stage for stage in self.stages if stage.stage_index == action.stage_index), None)
        schedule = step.schedule
        if kind is FORWARD:
            args, kwargs = step.arguments(stage, microbatch)
            output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=step.keep_outputs)
            schedule._maybe_compute_loss(stage, output, step.targets, microbatch)
        elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
            whole = kind is FULL_BACKWARD
            last = whole and self._is_last_backward(stage)
            loss = schedule._maybe_get_loss(stage, microbatch)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=whole, last_backward=last)
        elif kind is BACKWARD_WEIGHT:
            stage.backward_weight_one_chunk(microbatch, last_backward=self._is_last_backward(stage))
        elif kind is REDUCE_GRAD:
            stage.perform_reduce_grad(self._divisor)

    def _is_last_backward(self, stage: _PipelineStageBase) -> bool:
        counter = self.current.schedule.backward_counter
        counter[stage.stage_index] += 1
        return counter[stage.stage_index] == self._backwards[stage.stage_index]


def rows_of(microbatches: list) -> list[int]:
    """How many rows each microbatch has, which is how much its loss counts; empty if they are alike."""
    rows = []
    for microbatch in microbatches:
        sizes = [v.shape[0] for v in pytree.tree_leaves(microbatch) if isinstance(v, torch.Tensor) and v.dim() > 0]
        if not sizes:
            return []
        rows.append(sizes[0])
    return rows if len(set(rows)) > 1 else []
