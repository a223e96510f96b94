"""Functions in place of a schedule's actions, and what such a function finds on its schedule."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ._actions import _ComputationType
from ._errors import InvalidSchedule, InvalidValue
from ._step_by_step import REPLACEABLE
from .stage import _PipelineStageBase


class CustomFunctions:
    """The part of a schedule that steps in Python use.

    ``fwd_recv_ops`` and ``bwd_recv_ops``: by (stage, microbatch), the messages that were asked for and not waited for;
    ``backward_counter``: by stage, the backwards that are done.
    """

    _loss_fn: Callable[..., torch.Tensor] | None
    _n_microbatches: int
    scale_grads: bool

    def _begin_functions(self) -> None:
        self._functions: dict[_ComputationType, Callable] = {}
        self.fwd_recv_ops: dict[tuple[int, int], list] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list] = {}
        self.backward_counter: Counter[int] = Counter()
        self.unshard_ops: dict[int, list] = defaultdict(list)
        self.unsharded_stages: set[int] = set()
        self._step_losses: dict[int, torch.Tensor] = {}
        self._loss_weights: list[float] = []

    def register_custom_function(self, computation_type: _ComputationType, custom_function: Callable) -> None:
        """Runs ``custom_function(action, context)`` in place of every action of a kind, on all ranks alike.

        The function does all that the action does: take the messages from ``context.schedule_ref.fwd_recv_ops`` or
        ``bwd_recv_ops``, call the stage's ``forward_one_chunk`` or ``backward_one_chunk``, and hand values to a neighbour
        on the same rank. The parts of a pair (OVERLAP_F_B) that has no function of its own go to theirs. From then on
        the schedule runs in Python, with torch's messages and time-outs.
        """
        if computation_type not in REPLACEABLE:
            raise InvalidValue(f"actions of kind {computation_type} have no functions in their place")
        if computation_type in self._functions:
            warnings.warn(f"the function for {computation_type.value} is replaced", stacklevel=2)
        self._functions[computation_type] = custom_function
        self._run = None

    def _initialize_stage(self, args: Any = (), kwargs: Any = None, target: Any = None, loss_kwargs: Any = None) -> None:
        """Shapes come with the values: no stage is run to learn them."""

    _initialize_stages = _initialize_stage

    # --- a step ---
    def _begin_step(self, targets: list | None, loss_kwargs: dict[str, Any], rows: list[int]) -> None:
        self._end_step()
        self.backward_counter.clear()
        self._loss_kwargs = loss_kwargs
        self._loss_wanted = targets is not None or self._has_backward
        self._loss_weights = [n * len(rows) / sum(rows) for n in rows] if self.scale_grads else []

    def _end_step(self) -> None:
        self.fwd_recv_ops.clear()
        self.bwd_recv_ops.clear()
        self._step_losses = {}

    def _maybe_compute_loss(
        self, stage: _PipelineStageBase, output: Any, target_mbs: list | None, mb_index: int, loss_kwargs=None
    ) -> None:
        """Keeps the loss of a microbatch if `stage` is the last one and there is a loss function."""
        if not stage.is_last or self._loss_fn is None or not self._loss_wanted:
            return
        target = None if target_mbs is None else target_mbs[mb_index]
        self._step_losses[mb_index] = self._loss_fn(output, target, **(loss_kwargs or self._loss_kwargs))

    def _maybe_get_loss(self, stage: _PipelineStageBase, mb_index: int) -> torch.Tensor | None:
        """The loss that a microbatch's backward begins with, on the last stage; microbatches weigh by their rows."""
        if not stage.is_last or self._loss_fn is None:
            return None
        if mb_index not in self._step_losses:
            raise InvalidSchedule(f"microbatch {mb_index} has no loss yet, there are those of {sorted(self._step_losses)}")
        loss = self._step_losses[mb_index]
        return loss * self._loss_weights[mb_index] if self._loss_weights else loss
