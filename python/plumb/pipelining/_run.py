"""A schedule's stages at work: what the engine calls in a step."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .. import _C
from .._C import Error
from ._data_parallel import replicas_of
from ._step_gradients import names_of
from ._values import accepted, detached, pack, unpack
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


def own_arguments(stage: Any, stages: list, kwargs: dict[str, Any]) -> dict[str, Any]:
    """With several stages on a rank each gets those keyword arguments that it takes; stages of a cut model get all."""
    if not kwargs or len(stages) == 1 or stage.layout is not None:
        return kwargs
    unknown = kwargs.keys() - set().union(*(accepted(other.submod, kwargs) for other in stages))
    own = accepted(stage.submod, kwargs) | unknown  # the module's own error says what is wrong
    return {name: value for name, value in kwargs.items() if name in own}


class _Step:
    """What one step was given, and what came of it."""

    def __init__(self, args, kwargs, targets, loss_kwargs, keep_outputs, train):
        self.args, self.kwargs, self.targets, self.loss_kwargs = args, kwargs, targets, loss_kwargs
        self.keep_outputs, self.train = keep_outputs, train
        self.model_inputs: list[list[torch.Tensor | None]] = []  # of stages cut from a graph
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.failure: BaseException | None = None


class _LocalStage:
    """A stage as the engine calls it."""

    def __init__(self, run: Run, stage: _PipelineStageBase, names: dict[int, str]):
        self._run, self._stage, self._names = run, stage, names
        self.weight_work = stage.dw_builder
        self.recompute = stage.recompute

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        index = self._stage.stage_index
        named = self._stage.summed_parameters()
        return [(self._names.get(id(p), f"stage {index}: {name}"), p) for name, p in named]

    def run(self, inputs: list[torch.Tensor | None], microbatch: int) -> list[torch.Tensor | None]:
        step, stage = self._run.current, self._stage
        try:
            if stage.layout is not None:
                output, rows = stage.run_values(inputs, step.model_inputs[microbatch])
                values = ([output] if isinstance(output, torch.Tensor) else list(output)) + rows
            else:
                args = step.args[microbatch] if stage.is_first else unpack(inputs)
                kwargs = own_arguments(stage, self._run.stages, step.kwargs[microbatch])
                stage.check_example("input", args)
                output = stage.forward_maybe_with_nosync(*args, **kwargs)
                stage.check_example("output", output)
                values = None if stage.is_last else pack(output)
            return self._finish(step, output, microbatch) if stage.is_last else values
        except BaseException as error:
            step.failure = step.failure or error
            raise

    def _finish(self, step: _Step, output, microbatch: int) -> list[torch.Tensor]:
        if step.keep_outputs:
            step.outputs[microbatch] = detached(output)
        if self._run.loss_fn is None or (step.targets is None and not step.train):
            return []
        target = None if step.targets is None else step.targets[microbatch]
        loss = self._run.loss_fn(output, target, **step.loss_kwargs)
        if not isinstance(loss, torch.Tensor):
            raise Error(f"the loss function answered a {type(loss).__name__}, not a tensor")
        step.losses[microbatch] = loss.detach()
        return [loss] if step.train else []


class Run:
    """The engine's pipeline over Python stages. Blocks until all ranks have made theirs."""

    def __init__(
        self, table: _C.Schedule, stages: list[_PipelineStageBase], loss_fn: Callable | None, timeout: float, **options
    ):
        self.stages, self.loss_fn = sorted(stages, key=lambda stage: stage.stage_index), loss_fn
        self.current: _Step | None = None
        self._divides = bool(options.get("scale_grads"))
        layout = self.stages[0].layout or _C.PipelineLayout.open_chain(self.stages[0].num_stages)
        names = names_of(self.stages)
        group = self.stages[0].group
        if group is None and self.stages[0].group_size > 1:
            group = dist.distributed_c10d._get_default_group()
        local = {stage.stage_index: _LocalStage(self, stage, names) for stage in self.stages}
        if len(local) != len(stages):
            raise Error(f"two stages of this rank have the same index: {[stage.stage_index for stage in self.stages]}")
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        self._replicas = replicas_of(self.stages)
        self._pipeline = _C.Pipeline(layout, table, local, group, timeout, replicas=self._replicas, **options)

    def step(self, args, kwargs, targets, loss_kwargs, keep_outputs: bool, train: bool) -> list[torch.Tensor]:
        """Answers this rank's losses; its last stage gets its outputs."""
        step = self.current = _Step(args, kwargs, targets, loss_kwargs, keep_outputs, train)
        for stage in self.stages:
            stage.chunks = len(args)
        try:
            step.model_inputs = self._model_inputs(args, kwargs)
            for stage in self.stages if train else ():
                stage.hold_gradients()
            self._pipeline.run(step.model_inputs, rows_of(args if targets is None else targets), train)
            if train:
                for stage in self.stages:
                    stage.recomputed = self._pipeline.recomputed(stage.stage_index)
                    if self._replicas is None:
                        stage.reduce_gradients(len(args) if self._divides else 1)
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
            self.current = None
            step.failure = None
        for stage in self.stages:
            if stage.is_last:
                stage.output_chunks = [step.outputs[m] for m in sorted(step.outputs)]
        return [step.losses[m] for m in sorted(step.losses)]

    def _model_inputs(self, args, kwargs) -> list[list[torch.Tensor | None]]:
        """What stages cut from a graph take as the model's inputs, by microbatch: None for what is not given here."""
        if self.stages[0].layout is None:
            return []
        return [self.stages[0].model_inputs(*given) for given in zip(args, kwargs)]

    def gather_timeline(self) -> list[tuple[int, str, float, float, float]]:
        return self._pipeline.gather_timeline()


def rows_of(microbatches: list) -> list[int]:
    """How many rows each microbatch has, which is how much its loss counts; empty if they are alike."""
    rows = []
    for microbatch in microbatches:
        sizes = [v.shape[0] for v in pytree.tree_leaves(microbatch) if isinstance(v, torch.Tensor) and v.dim() > 0]
        if not sizes:
            return []
        rows.append(sizes[0])
    return rows if len(set(rows)) > 1 else []
