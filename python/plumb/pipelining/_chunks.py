"""A stage's work microbatch by microbatch, for those who drive it from Python: custom functions, and schedules of stages
that do something of their own. What the engine runs does not come through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._microbatch import Sizes, microbatch_sizes
from ._backward import _null_coalesce_accumulate, stage_backward, stage_backward_input, stage_backward_weight
from ._errors import InvalidSchedule
from ._messages import Receive, Send, Values, tag_of
from ._metadata import extract_tensor_metas, validate_tensors_metadata
from ._recut import pack as pack_sizes
from ._recut import sizes_of
from ._values import detached, flat_output, pack, unpack


class _RecvInfo:
    """Where an input of a stage comes from: described by stages that make their own messages."""

    def __init__(
        self,
        input_name: str,
        source: int | None,
        buffer: torch.Tensor | None = None,
        tensor_meta: Any = None,
        *,
        is_root_arg: bool = False,
    ):
        self.input_name, self.source, self.buffer = input_name, source, buffer
        self.tensor_meta, self.is_root_arg = tensor_meta, is_root_arg

    def __repr__(self) -> str:
        where = "a model input" if self.is_root_arg else f"stage {self.source}"
        return f"_RecvInfo({self.input_name} from {where})"


class ChunkSteps:
    """The part of a stage that runs a microbatch's forward and backward in Python.

    Between stages go lists of tensors; `forward_one_chunk` and `backward_one_chunk` take what has arrived and keep what
    is to be sent. On one rank `set_local_fwd_input` and `set_local_bwd_input` stand for the messages.
    """

    _has_backward = False
    _runtime_validate = False  # compare every microbatch's values with the first one's

    def _begin_chunks(self) -> None:
        self.fwd_cache: dict[int, tuple] = {}  # by microbatch: flat outputs, flat inputs
        self.bwd_cache: dict[int, dict[int, Values]] = {}  # by microbatch and stage: gradients of its inputs
        self.backward_state: dict[int, Any] = {}
        self.dw_runner: dict[int, Any] = {}
        self._sizes: dict[int, Sizes] = {}  # by microbatch: of the model's inputs, where they are not as they were cut
        self._incoming: dict[int, dict[int, Values]] = {}
        self._incoming_grads: dict[int, dict[int, Values]] = {}

    @property
    def has_backward(self) -> bool:
        """Whether the schedule has a backward."""
        return self._has_backward

    @has_backward.setter
    def has_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward

    @property
    def log_prefix(self) -> str:
        return f"[Stage {self.stage_index}]"

    # --- which stages it talks to: by stage, which of the sender's outputs (None: all) ---
    def _used_by(self, source: int, target: int) -> list[int]:
        table = self.pipe_info.table
        return sorted({port["index"] for port in table.inputs(target) if port["stage"] == source})

    def _sources(self) -> dict[int, list[int] | None]:
        if self.layout is None:
            return {} if self.is_first else {self.stage_index - 1: None}
        stages = {port["stage"] for port in self.pipe_info.table.inputs(self.stage_index)} - {-1}
        return {stage: self._used_by(stage, self.stage_index) for stage in sorted(stages)}

    def _targets(self) -> dict[int, list[int] | None]:
        if self.layout is None:
            return {} if self.is_last else {self.stage_index + 1: None}
        used = {stage: self._used_by(self.stage_index, stage) for stage in range(self.stage_index + 1, self.num_stages)}
        return {stage: indices for stage, indices in used.items() if indices}

    # Of a table with every stage on two ranks: the rank that runs a stage for a microbatch.
    _rank_in_table: Callable[[int, int], int] | None = None

    def _rank_of(self, stage: int, microbatch: int) -> int:
        in_table = self._rank_in_table
        return self.stage_index_to_group_rank[stage] if in_table is None else in_table(stage, microbatch)

    def _is_here(self, stage: int, microbatch: int) -> bool:
        return self._rank_of(stage, microbatch) == self.group_rank

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is not None and not 0 <= chunk_id < self.chunks:
            raise InvalidSchedule(f"{self.log_prefix} microbatch {chunk_id} is none of the step's {self.chunks}")

    # --- before a step: shapes come with the messages, so that there is nothing to find out ---
    def _prepare_forward_infra(self, num_microbatches, args=(), kwargs=None, has_backward=False) -> tuple:
        return ()

    def _prepare_backward_infra(self, num_microbatches, loss_fn=None, target=None, received_grad_meta=None) -> tuple:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list:
        return []

    # --- messages ---
    def _tag(self, backward: bool, other: int, sends: bool, microbatch: int) -> int:
        source, target = (self.stage_index, other) if sends else (other, self.stage_index)
        return tag_of(backward, source, target, microbatch, self.num_stages, self.chunks or microbatch + 1)

    def _send(self, backward: bool, other: int, values: Values, microbatch: int) -> Send:
        tag = self._tag(backward, other, True, microbatch)
        return Send(values, self._rank_of(other, microbatch), tag, self.group, self.device)

    def _receive(self, backward: bool, other: int, microbatch: int) -> Receive:
        kept = (self._incoming_grads if backward else self._incoming).setdefault(microbatch, {})
        tag = self._tag(backward, other, False, microbatch)
        peer = self._rank_of(other, microbatch)
        return Receive(peer, tag, self.group, self.device, lambda values: kept.__setitem__(other, values))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        """The messages with a microbatch's inputs that come from other ranks."""
        return [self._receive(False, s, fwd_chunk_id) for s in self._sources() if not self._is_here(s, fwd_chunk_id)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list:
        """The messages with a microbatch's outputs to stages on other ranks."""
        return [
            self._send(False, stage, self._outputs_for(stage, fwd_chunk_id), fwd_chunk_id)
            for stage in self._targets()
            if not self._is_here(stage, fwd_chunk_id)
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        if not self.has_backward:
            return []
        return [self._receive(True, s, bwd_chunk_id) for s in self._targets() if not self._is_here(s, bwd_chunk_id)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list:
        if not self.has_backward:
            return []
        self._check_chunk_id(bwd_chunk_id)
        grads = self.bwd_cache[bwd_chunk_id]
        return [self._send(True, s, grads.pop(s), bwd_chunk_id) for s in self._sources() if not self._is_here(s, bwd_chunk_id)]

    # --- the same between stages of one rank ---
    def _outputs_for(self, stage: int, microbatch: int) -> Values:
        outputs, indices = self.fwd_cache[microbatch][0], self._targets()[stage]
        if indices is None:
            return list(outputs)
        return [outputs[i] for i in indices] + [pack_sizes(self._sizes[microbatch], self.device)]

    def _take_outputs(self, source: int, values: Values, microbatch: int) -> None:
        """Values that a stage of this rank made, apart from its part of autograd's graph."""
        apart = [v if v is None else v.detach().requires_grad_(v.requires_grad) for v in values]
        self._incoming.setdefault(microbatch, {})[source] = apart

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """What the stage before returned for a microbatch, where it is on this rank."""
        outputs = flat_output(prev_stage_outputs) if self.layout is not None else pack(prev_stage_outputs)
        if self.layout is not None:
            indices = self._sources().get(self.stage_index - 1, [])
            outputs = [outputs[i] for i in indices] + [pack_sizes(sizes_of(outputs), self.device)]
        self._take_outputs(self.stage_index - 1, outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> tuple:
        """The gradients of a microbatch's inputs that the stage before, on this rank, made."""
        if not self.has_backward:
            raise InvalidSchedule(f"{self.log_prefix} there are no gradients in a step without a backward")
        self._check_chunk_id(mb_index)
        return tuple(self.bwd_cache[mb_index].pop(self.stage_index - 1, ()))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple, mb_index: int) -> None:
        """The gradients of what this stage handed to the next one on this rank."""
        self._incoming_grads.setdefault(mb_index, {})[self.stage_index + 1] = list(next_stage_bwd_outputs)

    # --- forward ---
    def _arrived(self, microbatch: int) -> dict[int, Values]:
        arrived = self._incoming.pop(microbatch, {})
        missing = [stage for stage in self._sources() if stage not in arrived]
        if missing:
            raise InvalidSchedule(f"{self.log_prefix} microbatch {microbatch} runs before stage {missing[0]}'s arrived")
        return arrived

    def _call(self, microbatch: int, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Values, dict[int, Values]]:
        """The module's output, the tensors it was called with, and those of them that came from other stages."""
        arrived = self._arrived(microbatch)
        if self.layout is None:
            args = args if self.is_first else unpack(arrived[self.stage_index - 1])
            self._validate("inputs", pytree.tree_leaves(args))
            inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            return self.forward_maybe_with_nosync(*args, **kwargs), inputs, arrived
        carried = [values.pop() for values in arrived.values()]
        places = {s: dict(zip(indices or [], arrived[s])) for s, indices in self._sources().items()}
        given = self.model_inputs(args, kwargs)
        sizes = self._sizes[microbatch] = self.cut_sizes.of_microbatch(given, carried)
        ports = self.pipe_info.table.inputs(self.stage_index)
        values = [given[p["index"]] if p["stage"] < 0 else places[p["stage"]][p["index"]] for p in ports]
        self._validate("inputs", values)
        with microbatch_sizes(sizes):
            return self.forward_maybe_with_nosync(*values), [v for v in values if v is not None], arrived

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple, kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Runs a microbatch's forward and answers what the module returned. `args` are the first stage's; the others
        take what has arrived from the stages before."""
        output, inputs, arrived = self._call(fwd_chunk_id, args, kwargs or {})
        flat = flat_output(output) if self.is_last or self.layout is not None else pack(output)
        if not self.is_last:
            self._validate("outputs", flat)
        elif save_forward_output:
            self.output_chunks.append(detached(output))
        self.fwd_cache[fwd_chunk_id] = (tuple(flat), inputs, arrived)
        return output

    def _validate(self, what: str, values: list) -> None:
        if not self._runtime_validate:
            return
        metas = extract_tensor_metas(values, allow_none=True) or ()
        known = self.__dict__.setdefault("_metas", {}).setdefault(what, metas)
        validate_tensors_metadata(f"Stage {self.stage_index}: forward {what}", known, metas)

    # --- backward ---
    def _output_grads(self, outputs: tuple, microbatch: int) -> Values:
        """Summed over the stages that use an output, from the last to the first as autograd does."""
        arrived = self._incoming_grads.pop(microbatch, {})
        grads: Values = [None] * len(outputs)
        for stage, indices in sorted(self._targets().items(), reverse=True):
            if stage not in arrived:
                raise InvalidSchedule(
                    f"{self.log_prefix} microbatch {microbatch} goes back before stage {stage}'s gradients arrived"
                )
            for i, grad in zip(range(len(outputs)) if indices is None else indices, arrived[stage]):
                grads[i] = _null_coalesce_accumulate(grads[i], grad)
        return grads

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs a microbatch's backward: whole, or the half of the inputs, which `backward_weight_one_chunk` completes.
        The last stage begins with `loss`."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        if bwd_chunk_id not in self.fwd_cache:
            raise InvalidSchedule(f"{self.log_prefix} microbatch {bwd_chunk_id} goes back without a forward_one_chunk")
        outputs, inputs, arrived = self.fwd_cache.pop(bwd_chunk_id)
        if self.is_last:
            pairs = [(loss, None)]
        else:
            pairs = [(o, g) for o, g in zip(outputs, self._output_grads(outputs, bwd_chunk_id)) if g is not None]
        pairs = [(root, grad) for root, grad in pairs if root is not None and root.requires_grad]
        roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        of_stage = [v for values in arrived.values() for v in values if v is not None]
        # Inputs from outside that are neither leaves nor keep their gradient hand it on by themselves.
        wanted = of_stage + [v for v in inputs if v.is_leaf or v.retains_grad]
        wanted = list({id(v): v for v in wanted}.values())
        if full_backward or self.dw_builder is not None:
            found = stage_backward(roots, grads, wanted)
            work = self.dw_builder() if self.dw_builder is not None else None
        else:
            weights = list(self.submod.parameters())
            found, groups = stage_backward_input(roots, None if self.is_last else grads, wanted, iter(weights))
            self.backward_state[bwd_chunk_id] = (wanted, groups, roots, grads)

            def work() -> None:
                _, groups, _, _ = self.backward_state.pop(bwd_chunk_id)
                stage_backward_weight(iter(weights), groups)

        by_id = {id(v): grad for v, grad in zip(wanted, found)}
        self.bwd_cache[bwd_chunk_id] = {
            stage: [None if v is None else by_id[id(v)] for v in values] for stage, values in arrived.items()
        }
        if work is not None and full_backward:
            work()
        elif work is not None:
            self.dw_runner[bwd_chunk_id] = work

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the half of the weights. Raises `plumb.Error` (an AssertionError too) unless the other half has run."""
        if bwd_chunk_id not in self.dw_runner:
            raise InvalidSchedule(
                f"{self.log_prefix} microbatch {bwd_chunk_id} has no weight gradients to make\n"
                "  try: backward_one_chunk(..., full_backward=False) first"
            )
        self.dw_runner.pop(bwd_chunk_id)()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """What is left to do once a stage's gradients are complete: means over replicas, and the scaling."""
        self.reduce_gradients()
        self.scale_grads(grad_scale_factor)
