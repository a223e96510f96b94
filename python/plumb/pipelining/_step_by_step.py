"""A schedule's step in Python: for custom functions, for stages that do something of their own, and for stages that
compare what they hand on. Slower than the engine, with torch's messages and time-outs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._C import Error
from ._actions import (
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
    _Action,
    _ComputationType,
)
from ._chunks import ChunkSteps
from ._data_parallel import Replicated, replicas_of
from ._errors import InvalidSchedule
from ._messages import _batch_p2p, _wait_batch_p2p
from ._run import own_arguments, rows_of
from ._step_gradients import Copies, StageGradients, give_up

REPLACEABLE = (
    FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD
)  # fmt: skip
_FORWARD_ONLY = (FORWARD, SEND_F, RECV_F, UNSHARD, RESHARD)
_OWN = [
    "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "get_fwd_recv_ops", "get_fwd_send_ops",
    "get_bwd_recv_ops", "get_bwd_send_ops", "set_local_fwd_input", "set_local_bwd_input", "get_local_bwd_output",
]  # fmt: skip


@dataclass
class _PipelineContext:
    """What a custom function is told of the step, beside its action."""

    schedule_ref: Any
    arg_mbs: list[tuple] | None = None
    kwarg_mbs: list[dict] | None = None
    target_mbs: list | None = None
    losses: list | None = None


def _overrides(stage: Any, names: Iterable[str]) -> bool:
    return any(
        name in stage.__dict__ or getattr(type(stage), name) is not getattr(ChunkSteps, name) for name in names
    )


def runs_in_python(stage: Any) -> bool:
    """True if the engine cannot run a stage because it has methods of its own, or compares its values."""
    return stage._runtime_validate or _overrides(stage, _OWN)


def check_neighbours(stage: Any) -> None:
    """Refuses a stage that makes messages of its own, to others than its neighbours: the table knows only these."""
    index = stage.stage_index
    infos = getattr(stage, "args_recv_info", {}).get(0, ())
    asked = {
        "receives from": ({info.source for info in infos if getattr(info, "source", None) is not None}, index - 1),
        "sends to": (
            {target for targets in getattr(stage, "act_send_info", {}).values() for target in targets if target is not None},
            index + 1,
        ),
    }
    for what, (others, neighbour) in asked.items():
        if far := sorted(others - ({neighbour} if 0 <= neighbour < stage.num_stages else set())):
            raise InvalidSchedule(
                f"stage {index} {what} stages {far}, and this schedule has adjacent-stage communication only\n"
                "  try: pipeline(...), whose stages send values to wherever they are used"
            )


class StepByStep:
    """Runs the table of a schedule, action by action, with the stages' methods."""

    def __init__(self, schedule: Any, functions: dict[_ComputationType, Callable]):
        self.schedule, self.functions = schedule, functions
        self.stages = {stage.stage_index: stage for stage in schedule._stages}
        self.row: list[_Action] = schedule.actions_with_messages()
        self._messages = {
            (part.stage_index, part.computation_type) for part in self.row if part.computation_type not in REPLACEABLE
        }
        # By stage: the microbatches of this rank, in the order in which the table makes their weights' gradients.
        self._microbatches: dict[int, list[int]] = {index: [] for index in self.stages}
        for action in self.row:
            for part in action.sub_actions or (action,):
                if part.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT):
                    self._microbatches.setdefault(part.stage_index, []).append(part.microbatch_index)
        self._sent: list[list] = []
        self._prepared = False
        self._copies: Copies | None = None
        self._steps = 0
        self._events: list[tuple[int, str, float, float, float]] = []
        self._began = 0.0

    def step(self, args, kwargs, targets, loss_kwargs, keep_outputs: bool, train: bool) -> list[torch.Tensor]:
        """Answers this rank's losses; its last stage gets its outputs."""
        schedule = self.schedule
        self._args, self._kwargs, self._keep = args, kwargs, keep_outputs
        self._train = train
        self._context = _PipelineContext(schedule, args, kwargs, targets, None)
        for stage in self.stages.values():
            stage.chunks = len(args)
        self._prepare()
        schedule._begin_step(targets, loss_kwargs, rows_of(args if targets is None else targets))
        self._events.clear()
        random_state = torch.get_rng_state() if schedule.seed is not None else None
        self._gradients: dict[int, StageGradients] = {}
        self._reducing: dict[int, float] = {}  # by stage: when its sum over replicas began
        action = None
        try:
            if train:
                self._hold_gradients()
            with torch.set_grad_enabled(train):
                for action in self.row:
                    self._run(action)
                if train:
                    self._complete_gradients()
            for works in self._sent:
                _wait_batch_p2p(works)
            self._steps += 1
            return [loss.detach() for _, loss in sorted(schedule._step_losses.items())]
        except BaseException as error:
            give_up(self._gradients.values())
            if hasattr(error, "add_note"):
                error.add_note(f"rank {schedule._stages[0].group_rank}, action {action}")
            raise
        finally:
            if random_state is not None:
                torch.set_rng_state(random_state)
            schedule._end_step()
            self._sent.clear()
            for stage in self.stages.values():
                stage.release_gradients()
                stage._begin_chunks()

    # --- gradients ---
    def _hold_gradients(self) -> None:
        for stage in self.stages.values():
            stage.hold_gradients()
        if self._copies is None:
            self._copies = Copies(list(self.stages.values()))
        self._gradients = {i: StageGradients(stage, self._microbatches[i]) for i, stage in self.stages.items()}

    def _complete_gradients(self) -> None:
        """The end of a step: copies are summed before anything is made of their sums."""
        for index in self._copies.stages:
            with self._gradients[index].complete():
                pass
        self._copies.sum(self._gradients)
        for index in sorted(self.stages.keys() - self._reduced):
            self._run_part(_Action(index, REDUCE_GRAD))
        for gradients in self._gradients.values():
            gradients.finish()

    def _ends_later(self, index: int) -> bool:
        """Whether a stage's REDUCE_GRAD is for the end of the step: of copies it is made of their sums, and means over
        replicas are under way until then."""
        stage = self.stages[index]
        if index in self._copies.stages:
            return True
        own = REDUCE_GRAD in self.functions or _overrides(stage, ["perform_reduce_grad"])
        if own or not isinstance(stage.reduction, Replicated):
            return False
        self._reducing[index] = time.monotonic()
        with self._gradients[index].complete():
            stage.reduction.start()
        return True

    def _adding(self, part: _Action) -> Any:
        """What surrounds an action that adds to gradients, or is about them."""
        gradients = self._gradients.get(part.stage_index)
        if gradients is None:
            return contextlib.nullcontext()
        if part.computation_type in (FULL_BACKWARD, BACKWARD_WEIGHT):
            return gradients.adding(part.microbatch_index)
        return gradients.complete() if part.computation_type is REDUCE_GRAD else contextlib.nullcontext()

    # --- what a step tells of itself ---
    def gather_timeline(self) -> list[tuple[int, str, float, float, float]]:
        """The last step on all ranks. All must ask."""
        stage = self.schedule._stages[0]
        events = [self._events]
        if stage.group_size > 1:
            events = [[] for _ in range(stage.group_size)]
            dist.all_gather_object(events, self._events, group=stage.group)
        whole = [event for part in events for event in part]
        first = min((waiting for _, _, waiting, _, _ in whole), default=0.0)
        return [(rank, text, *(t - first for t in times)) for rank, text, *times in whole]

    def _record(self, action: _Action, waiting: float) -> None:
        reduces = action.computation_type is REDUCE_GRAD and self.stages[action.stage_index].reduction is not None
        if reduces:
            waiting = self._began = self._reducing.get(action.stage_index, waiting)
        if self.schedule.record_timeline and (action.is_compute_op or reduces):
            rank = self.schedule._stages[0].group_rank
            self._events.append((rank, str(action), waiting, self._began, time.monotonic()))

    def _check_finite(self, part: _Action) -> None:
        """What leaves a stage after an action."""
        if not self.schedule.check_numerics:
            return
        kind, index, microbatch = part.computation_type, part.stage_index, part.microbatch_index
        stage, where = self.stages[index], f"of stage {index}, microbatch {microbatch}"
        values: list[tuple[str, Any]] = []
        if kind is FORWARD:
            outputs = stage.fwd_cache.get(microbatch, ((),))[0]
            values += [(f"output {i} {where}", v) for i, v in enumerate(outputs)]
            values.append((f"the loss of microbatch {microbatch}", self.schedule._step_losses.get(microbatch)))
        elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
            grads = [g for of in stage.bwd_cache.get(microbatch, {}).values() for g in of]
            values += [(f"the gradient of input {i} {where}", g) for i, g in enumerate(grads)]
        for what, value in values:
            if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
                place = torch.nonzero(~torch.isfinite(value.detach()))[0].tolist()
                entry = f"{place} is {value.detach()[tuple(place)].item()}"
                raise Error(f"rank {stage.group_rank} at {part}: {what}: entry {entry}")

    def _seed(self, part: _Action) -> None:
        """As the engine does, before every forward."""
        seed = self.schedule.seed
        if seed is None or part.computation_type is not FORWARD:
            return
        replicas = replicas_of(list(self.stages.values()))
        first = 0 if replicas is None else dist.get_rank(replicas) * self.schedule._n_microbatches
        number = seed
        for part_of in (self._steps, part.stage_index, first + part.microbatch_index):
            number = number * 1000003 + part_of
        torch.default_generator.manual_seed(number % 2**64)

    def _prepare(self) -> None:
        self._reduced: set[int] = set()
        if self._prepared:
            return
        for stage in self.stages.values():
            if _overrides(stage, ["_prepare_forward_infra"]):
                stage._prepare_forward_infra(len(self._args), self._args[0], self._kwargs[0], self._train)
                check_neighbours(stage)
            if self._train and _overrides(stage, ["_prepare_backward_infra"]):
                stage._prepare_backward_infra(len(self._args))
        self._prepared = True

    # --- one action ---
    def _run(self, action: _Action) -> None:
        whole = action.sub_actions or (action,)
        parts = [part for part in whole if self._train or part.computation_type in _FORWARD_ONLY]
        together = self.functions.get(OVERLAP_F_B) if action.sub_actions and len(parts) == len(whole) else None
        if together is None:
            for part in parts:
                if part.computation_type is not REDUCE_GRAD or not self._ends_later(part.stage_index):
                    self._run_part(part)
            return
        waiting = time.monotonic()
        for part in parts:
            self._receive_what_no_action_does(part)
        self._began = time.monotonic()
        with contextlib.ExitStack() as around:
            for part in parts:
                self._seed(part)
                around.enter_context(self._adding(part))
            together(action, self._context)
        for part in parts:
            self._check_finite(part)
            self._hand_on_what_no_action_does(part, to_neighbours=False)
        self._record(action, waiting)

    def _run_part(self, part: _Action) -> None:
        function = self.functions.get(part.computation_type)
        waiting = time.monotonic()
        self._receive_what_no_action_does(part)
        self._began = time.monotonic()
        self._seed(part)
        with self._adding(part):
            if function is not None:
                function(part, self._context)
            else:
                self._perform(part)
        self._check_finite(part)
        if part.computation_type is REDUCE_GRAD:
            self._reduced.add(part.stage_index)
        self._hand_on_what_no_action_does(part, to_neighbours=function is None)
        self._record(part, waiting)

    def _perform(self, action: _Action) -> None:
        schedule, kind, microbatch = self.schedule, action.computation_type, action.microbatch_index
        stage = self.stages[action.stage_index]
        key = (action.stage_index, microbatch)
        if kind is FORWARD:
            _wait_batch_p2p(schedule.fwd_recv_ops.pop(key, ()))
            self._began = time.monotonic()
            kwargs = own_arguments(stage, schedule._stages, self._kwargs[microbatch])
            output = stage.forward_one_chunk(
                microbatch, self._args[microbatch], kwargs, save_forward_output=self._keep
            )
            schedule._maybe_compute_loss(stage, output, self._context.target_mbs, microbatch)
        elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
            _wait_batch_p2p(schedule.bwd_recv_ops.pop(key, ()))
            self._began = time.monotonic()
            whole = kind is FULL_BACKWARD
            last = self._count(action.stage_index) if whole else False
            loss = schedule._maybe_get_loss(stage, microbatch)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=whole, last_backward=last)
        elif kind is BACKWARD_WEIGHT:
            stage.backward_weight_one_chunk(microbatch, last_backward=self._count(action.stage_index))
        elif kind is REDUCE_GRAD:
            stage.perform_reduce_grad(schedule._n_microbatches if schedule.scale_grads else 1)
        elif kind is SEND_F:
            self._sent.append(_batch_p2p(stage.get_fwd_send_ops(microbatch)))
        elif kind is SEND_B:
            self._sent.append(_batch_p2p(stage.get_bwd_send_ops(microbatch)))
        elif kind is RECV_F:
            schedule.fwd_recv_ops[key] = _batch_p2p(stage.get_fwd_recv_ops(microbatch))
        elif kind is RECV_B:
            schedule.bwd_recv_ops[key] = _batch_p2p(stage.get_bwd_recv_ops(microbatch))

    def _count(self, stage: int) -> bool:
        self.schedule.backward_counter[stage] += 1
        return self.schedule.backward_counter[stage] == len(self._microbatches[stage])

    # --- messages that the table has no action for: skip connections beside neighbours of one rank ---
    def _receive_what_no_action_does(self, part: _Action) -> None:
        index, kind, microbatch = part.stage_index, part.computation_type, part.microbatch_index
        if kind is FORWARD and (index, RECV_F) not in self._messages:
            _wait_batch_p2p(_batch_p2p(self.stages[index].get_fwd_recv_ops(microbatch)))
        elif kind in (FULL_BACKWARD, BACKWARD_INPUT) and (index, RECV_B) not in self._messages:
            _wait_batch_p2p(_batch_p2p(self.stages[index].get_bwd_recv_ops(microbatch)))

    def _hand_on_what_no_action_does(self, part: _Action, to_neighbours: bool) -> None:
        index, kind, microbatch = part.stage_index, part.computation_type, part.microbatch_index
        stage = self.stages[index]
        if kind is FORWARD:
            if (index, SEND_F) not in self._messages:
                self._sent.append(_batch_p2p(stage.get_fwd_send_ops(microbatch)))
            for target in stage._targets():
                if stage._is_here(target, microbatch) and (to_neighbours or target != index + 1):
                    self.stages[target]._take_outputs(index, stage._outputs_for(target, microbatch), microbatch)
        elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
            if (index, SEND_B) not in self._messages:
                self._sent.append(_batch_p2p(stage.get_bwd_send_ops(microbatch)))
            for source in stage._sources():
                if stage._is_here(source, microbatch) and (to_neighbours or source != index - 1):
                    grads = stage.bwd_cache[microbatch].pop(source)
                    self.stages[source]._incoming_grads.setdefault(microbatch, {})[index] = grads
