"""A schedule's stages at work: what the engine calls in a step, and hooks of it: functions in the place of actions, stages
with methods of their own."""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from ._actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, REDUCE_GRAD, _Action, _ComputationType
from ._chunks import ChunkSteps, EngineStage, detached, names_of, own_arguments
from ._utils import InvalidSchedule, InvalidValue
from .stage import _PipelineStageBase, replicas_of

# The methods of a stage that stand for actions.
_METHODS = {
    FORWARD: "forward_one_chunk",
    FULL_BACKWARD: "backward_one_chunk",
    BACKWARD_INPUT: "backward_one_chunk",
    BACKWARD_WEIGHT: "backward_weight_one_chunk",
    REDUCE_GRAD: "perform_reduce_grad",
}
_MESSAGES = ["get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"]


@dataclass
class _PipelineContext:
    """The step, as a custom function sees it beside its action."""

    schedule_ref: Any
    arg_mbs: list[tuple] | None = None
    kwarg_mbs: list[dict] | None = None
    target_mbs: list | None = None
    losses: list | None = None


def _overrides(stage: Any, names: Iterable[str]) -> list[str]:
    base, cls = ChunkSteps, type(stage)
    return [name for name in names if name in stage.__dict__ or getattr(cls, name) is not getattr(base, name)]


def prepare_own(stages: list, arg_mbs: list, kwarg_mbs: list, train: bool) -> InvalidSchedule | None:
    """Before the first step: has stages prepare themselves that do so. Returns why a table with actions cannot be run, if
    it cannot. Raises `InvalidSchedule` for messages to others than neighbors."""
    refused = None
    for stage in stages:
        if _overrides(stage, ["_prepare_forward_infra"]):
            stage._prepare_forward_infra(len(arg_mbs), arg_mbs[0], kwarg_mbs[0], train)
            _check_neighbors(stage)
        if train and _overrides(stage, ["_prepare_backward_infra"]):
            stage._prepare_backward_infra(len(arg_mbs))
        if own := _overrides(stage, _MESSAGES):
            refused = InvalidSchedule(
                f"stage {stage.stage_index} makes messages of its own ({', '.join(own)}), and the engine sends and receives",
                remedy="leave these methods out; values may have any shapes, and change from microbatch to microbatch",
            )
        if hasattr(stage, "backward_maybe_with_nosync"):  # torch's stages have it, these do not
            refused = InvalidSchedule(
                f"stage {stage.stage_index} has a backward of its own (backward_maybe_with_nosync), which the engine does not call",
                remedy="override backward_one_chunk; gradients of data parallel modules are reduced once a step",
            )
    return refused


def _check_neighbors(stage: Any) -> None:
    """Refuses a stage that describes messages to others than its neighbors: the table knows only these."""
    index = stage.stage_index
    sources = {getattr(info, "source", None) for info in getattr(stage, "args_recv_info", {}).get(0, ())}
    targets = {target for some in getattr(stage, "act_send_info", {}).values() for target in some}
    for what, others, neighbor in (("receives from", sources, index - 1), ("sends to", targets, index + 1)):
        if far := sorted(others - {neighbor, None}):
            raise InvalidSchedule(
                f"stage {index} {what} stages {far}, and this schedule has adjacent-stage communication only",
                remedy="pipeline(...), whose stages send values to wherever they are used",
            )


class CustomFunctions:
    """The part of a schedule that functions in the place of its actions use.

    ``fwd_recv_ops`` and ``bwd_recv_ops``: by (stage, microbatch), what there is to wait for before the action that runs:
    nothing, as its messages are there. ``backward_counter``: by stage, the backwards that functions have counted.
    """

    _loss_fn: Callable[..., torch.Tensor] | None
    _step: Any = None  # the one that runs

    def _begin_functions(self) -> None:
        self._functions: dict[_ComputationType, Callable] = {}
        self.fwd_recv_ops: dict[tuple[int, int], list] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list] = {}
        self.backward_counter: Counter[int] = Counter()

    def register_custom_function(self, computation_type: _ComputationType, custom_function: Callable) -> None:
        """Runs ``custom_function(action, context)`` in the place of every action of a kind on this rank.

        When it is called the action's values and gradients have arrived, those of both parts of a pair (OVERLAP_F_B).
        The function calls the stage's ``forward_one_chunk``, ``backward_one_chunk`` or ``backward_weight_one_chunk`` (a
        pair's from two threads if it likes) and ``context.schedule_ref._maybe_compute_loss``. What they made is then
        checked and passed on, to stages of the same rank too. The parts of a pair without a function of its own go to
        theirs. REDUCE_GRAD comes when a stage's gradients are complete, and scales them.
        """
        if computation_type.value.startswith(("SEND", "RECV", "WAIT")):
            raise InvalidValue(f"actions of kind {computation_type} have no functions in their place")
        if computation_type in self._functions:
            warnings.warn(f"the function for {computation_type.value} is replaced", stacklevel=2)
        self._functions[computation_type] = custom_function
        self._run = None

    def _of_step(self) -> Any:
        if self._step is None:
            raise Error("no step is running: this is for functions in the place of a schedule's actions")
        return self._step

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: list | None, mb_index: int, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Keeps the loss of a microbatch if `stage` is the last one and there is a loss function."""
        if stage.is_last and self._loss_fn is not None:
            target = None if target_mbs is None else target_mbs[mb_index]
            self._of_step().compute_loss(output, target, mb_index, loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        """The loss that a microbatch's backward begins with, on the last stage; microbatches weigh by their rows."""
        if not stage.is_last or self._loss_fn is None:
            return None
        step = self._of_step()
        if mb_index not in step.roots:
            raise InvalidSchedule(f"microbatch {mb_index} has no loss yet, there are those of {sorted(step.roots)}")
        return step.roots[mb_index] * step.weights[mb_index] if step.weights else step.roots[mb_index]


def _wait_batch_p2p(work: Iterable) -> None:
    for part in work:
        part.wait()


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


_stages_lock = threading.Lock()


@contextlib.contextmanager
def running(stages: list) -> Iterator[None]:
    """Refuses a step of stages that are in one already, before anything of that one is touched."""
    with _stages_lock:
        if busy := [stage.stage_index for stage in stages if getattr(stage, "in_step", False) is True]:
            raise Error(
                f"stage {busy[0]} runs in a step already",
                kind=ErrorKind.InvalidState,
                remedy="one step of a stage at a time: no other thread's, and none from a loss function or a hook",
            )
        for stage in stages:
            stage.in_step = True
    try:
        yield
    finally:
        for stage in stages:
            stage.in_step = False


class _Step:
    """One step: its arguments and its results."""

    def __init__(self, run: Run, schedule: Any, args, kwargs, targets, loss_kwargs, keep_outputs, train):
        self.run, self.stages, self.driver, self.schedule = run, run.stages, run.driver, schedule
        # The model's inputs of stages cut from a graph, by microbatch; None for an input that is not given here.
        cut = run.stages[0].layout is not None
        self.model_inputs = [run.stages[0].model_inputs(*given) for given in zip(args, kwargs)] if cut else []
        self.own_inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # the caller's, and what other stages get in its place
        # A map over all microbatches costs more than a look at each.
        if train and not cut and any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._own_input, (args, kwargs))
        self.args, self.kwargs, self.targets, self.loss_kwargs = args, kwargs, targets, loss_kwargs
        self.keep_outputs, self.train = keep_outputs, train
        self.context = _PipelineContext(schedule, args, kwargs, targets)
        rows, schedule._rows = schedule._rows, None
        if targets is not None or not rows:
            rows = rows_of(list(zip(args, kwargs)) if targets is None else targets)
        self.rows = rows if len(set(rows)) > 1 else []
        self.weights = [n * len(self.rows) / sum(self.rows) for n in self.rows] if schedule.scale_grads else []
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.roots: dict[int, torch.Tensor] = {}  # losses, for hooks
        self.failure: Exception | None = None

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Names of the parameters of all stages, by id."""
        return names_of(self.stages)

    def _own_input(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            return x
        own = x.detach().requires_grad_()
        self.own_inputs.append((x, own))
        return own.clone()  # a stage may begin with an in-place operator, which no leaf allows

    def pass_gradients_on(self, grads: list[list[torch.Tensor | None]]) -> None:
        """Goes on backward from the inputs, all microbatches at once: they are parts of what the caller gave, which need not
        be a leaf. `grads`: those of `model_inputs`."""
        both = [(x, grad) for xs, gs in zip(self.model_inputs, grads) for x, grad in zip(xs, gs) if grad is not None]
        both += [(x, own.grad) for x, own in self.own_inputs if own.grad is not None]
        if both:
            torch.autograd.backward(*zip(*both))

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
            raise Error(f"the loss function returned a {type(loss).__name__}, not a tensor")
        if loss.numel() != 1 or loss.is_complex():
            raise Error(
                f"the loss function returned a {loss.dtype} tensor of shape {list(loss.shape)}, not one number",
                kind=ErrorKind.StructureMismatch,
                remedy='one real number a microbatch: loss.mean(), reduction="mean", loss.abs() of a complex one',
            )
        if self.train and not loss.requires_grad:
            raise Error(
                f"the loss of microbatch {microbatch} requires no gradient",
                kind=ErrorKind.TensorMismatch,
                remedy="a loss that depends on what is trained, output.sum() * 0 for a microbatch without one; eval() if nothing is trained",
            )
        self.losses[microbatch] = loss.detach()
        return loss

    def finish(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        """Takes an output of the last stage. Returns its losses."""
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
        parts = action.sub_actions or (action,)
        for part in parts:
            ops = schedule.fwd_recv_ops if part.computation_type is FORWARD else schedule.bwd_recv_ops
            ops[part.stage_index, part.microbatch_index] = []
        try:
            function(action, self.context)
        except Exception as error:
            self.failure = self.failure or error
            raise
        finally:
            schedule.fwd_recv_ops.clear()
            schedule.bwd_recv_ops.clear()
            for stage in self.stages:
                stage.fwd_cache.clear()
                stage.bwd_cache.clear()
            for part in parts:
                if part.computation_type is not FORWARD:
                    self.roots.pop(part.microbatch_index, None)


class Run:
    """The engine's pipeline over Python stages. Blocks until all ranks have made theirs."""

    def __init__(self, table: _C.Schedule, stages: list[_PipelineStageBase], timeout: float, functions: dict, **options):
        self.stages = sorted(stages, key=lambda stage: stage.stage_index)
        self.current: _Step | None = None
        self.options = options
        self._divisor = table.num_microbatches if options.get("scale_grads") else 1
        layout = self.stages[0].layout or self.stages[0].chain()
        group = self.stages[0].group
        if group is None and self.stages[0].group_size > 1:
            group = dist.distributed_c10d._get_default_group()
        local = self._engine_stages = {stage.stage_index: EngineStage(stage, self.stages) for stage in self.stages}
        if len(local) != len(stages):
            raise Error(f"two stages of this rank have the same index: {[stage.stage_index for stage in self.stages]}")
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        this = weakref.ref(self)  # the engine's objects are none for Python's collector
        instead = {(kind.value, -1): function for kind, function in functions.items()}  # by kind and stage; -1: all
        for kind, method in _METHODS.items():
            for stage in self.stages if (kind.value, -1) not in instead else ():
                if _overrides(stage, [method]):
                    instead[kind.value, stage.stage_index] = lambda action, _: this().perform(action)
        hooks = {
            point: lambda text, function=function: this().current.call(function, _Action.from_str(text))
            for point, function in instead.items()
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
        """Returns this rank's losses; its last stage gets its outputs."""
        step = self.current = schedule._step = _Step(
            self, schedule, args, kwargs, targets, loss_kwargs, keep_outputs, train
        )
        schedule.backward_counter.clear()
        for stage in self.stages:
            stage.chunks, stage._step = len(args), step
        try:
            for stage in self.stages if train else ():
                stage.hold_gradients()
            for stage in self.stages if not self.has_hooks else ():
                with contextlib.suppress(Exception):  # which the forward raises in its place, so that the other ranks hear of it
                    self._engine_stages[stage.stage_index].graph = stage.graph_alone()
            grads = self.pipeline.run(step.model_inputs, step.rows, train)
            if train:
                for stage in self.stages:
                    stage.recomputed = self.pipeline.recomputed(stage.stage_index)
                    if self._replicas is None and stage.stage_index not in self._reduces:
                        stage.reduce_gradients(self._divisor)
                step.pass_gradients_on(grads)
        except Error as error:
            failure = step.failure
            if failure is None or failure is error:
                raise
            raised = type(failure) if isinstance(failure, Error) else Error  # which may be a ValueError, too
            raise raised(error.message, kind=error.kind, where=error.where, remedy=error.remedy) from failure
        finally:
            for stage in self.stages:
                self._engine_stages[stage.stage_index].graph = None
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
    """Returns how many rows each microbatch has, which is how much its loss counts; empty if one has no tensor with rows."""
    rows = []
    for microbatch in microbatches:
        sizes = [v.shape[0] for v in pytree.tree_leaves(microbatch) if isinstance(v, torch.Tensor) and v.dim() > 0]
        if not sizes:
            return []
        rows.append(sizes[0])
    return rows
