"""Functions in the place of a schedule's actions, and stages with methods of their own: hooks of the engine's step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import Error
from ._actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _ComputationType,
)
from ._chunks import ChunkSteps
from ._errors import InvalidSchedule, InvalidValue

REPLACEABLE = (
    FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAP_F_B, UNSHARD, RESHARD, REDUCE_GRAD
)  # fmt: skip
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
    """What a custom function is told of the step, beside its action."""

    schedule_ref: Any
    arg_mbs: list[tuple] | None = None
    kwarg_mbs: list[dict] | None = None
    target_mbs: list | None = None
    losses: list | None = None


def _overrides(stage: Any, names: Iterable[str]) -> list[str]:
    def own(name: str) -> bool:
        return name in stage.__dict__ or getattr(type(stage), name) is not getattr(ChunkSteps, name)

    return [name for name in names if own(name)]


def hooks_of(stages: list, functions: dict[_ComputationType, Callable], perform: Callable) -> dict:
    """By kind of action and stage (-1: every stage). Stages with methods of their own are run by `perform`."""
    hooks = {(kind.value, -1): function for kind, function in functions.items()}
    for stage in stages:
        for kind, method in _METHODS.items():
            if kind not in functions and _overrides(stage, [method]):
                hooks[kind.value, stage.stage_index] = perform
    return hooks


def prepare_own(stages: list, arg_mbs: list, kwarg_mbs: list, train: bool) -> InvalidSchedule | None:
    """Before the first step: has stages prepare themselves that do so. Answers why a table with actions cannot be run, if
    it cannot. Raises `InvalidSchedule` for messages to others than neighbours."""
    refused = None
    for stage in stages:
        if _overrides(stage, ["_prepare_forward_infra"]):
            stage._prepare_forward_infra(len(arg_mbs), arg_mbs[0], kwarg_mbs[0], train)
            _check_neighbours(stage)
        if train and _overrides(stage, ["_prepare_backward_infra"]):
            stage._prepare_backward_infra(len(arg_mbs))
        if own := _overrides(stage, _MESSAGES):
            refused = InvalidSchedule(
                f"stage {stage.stage_index} makes messages of its own ({', '.join(own)}), and the engine sends and receives",
                remedy="leave these methods out; values may have any shapes, and change from microbatch to microbatch",
            )
    return refused


def _check_neighbours(stage: Any) -> None:
    """Refuses a stage that describes messages to others than its neighbours: the table knows only these."""
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
        checked and handed on, to stages of the same rank too. The parts of a pair without a function of its own go to
        theirs. REDUCE_GRAD comes when a stage's gradients are complete, and scales them.
        """
        if computation_type not in REPLACEABLE:
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
