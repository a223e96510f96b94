"""A stage of a pipeline: a part of the model on one rank. If torch replicates or shards its module over other ranks, its
gradients are reduced once a step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .. import _C
from .._arguments import checked
from .._errors import Error, ErrorKind
from .._state import is_of, unwrapped
from ._chunks import ChunkSteps
from ._stage_module import Sizes, StageModule, at_sizes
from ._utils import InvalidValue, PipeInfo, PipeliningMetadataError, Wire, wire_texts  # noqa: F401

__all__ = ["PipelineStage", "PipelineStageInfo", "build_stage"]


@dataclass(frozen=True, kw_only=True)
class PipelineStageInfo:
    """A forward of a stage, as `register_forward_context` tells of it. `is_metadata_inference` is always False: nothing is run
    to learn sizes."""

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


def _is_sharded(module: torch.nn.Module) -> bool:
    return is_of(module, "torch.distributed.fsdp", "FSDPModule")


def reduction_of(module: Any) -> Replicated | Sharded | None:
    """Returns how the gradients of a stage's module become means over its replicas; None: it has none."""
    if isinstance(module, DistributedDataParallel):
        return Replicated(module)
    if isinstance(module, torch.nn.Module) and any(_is_sharded(m) for m in module.modules()):
        return Sharded(module)
    return None


def replicas_of(stages: list) -> dist.ProcessGroup | None:
    """Returns the ranks over which the engine takes means of gradients, stage by stage while others go on: those of the
    `DistributedDataParallel` modules if all stages are such, over the same ranks, on the CPU. None: `Replicated` does it
    after the step."""
    if not all(isinstance(stage.submod, DistributedDataParallel) for stage in stages):
        return None
    groups = {id(stage.submod.process_group): stage.submod.process_group for stage in stages}
    (group, *others) = groups.values()
    on_cpu = all(p.device.type == "cpu" for stage in stages for p in stage.submod.parameters())
    if others or not on_cpu or dist.get_world_size(group) == 1 or "gloo" not in dist.get_backend(group):
        return None
    return group


class Replicated:
    """`DistributedDataParallel`: every rank holds all parameters."""

    def __init__(self, module: DistributedDataParallel):
        self._module = module

    def owned(self) -> set[int]:
        return set()

    def begin(self) -> None:
        pass  # forwards run under no_sync

    end = went_forward = begin

    def finish(self, divisor: int) -> None:
        """Means over the replicas. The engine has divided by the microbatches."""
        group = self._module.process_group
        grads = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
        try:
            for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
                work.wait()
            for grad in grads:
                grad.div_(dist.get_world_size(group))
        except RuntimeError as error:
            others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"
            said = str(error).splitlines()[0]
            raise Error(
                f"the mean of gradients over replicas: {who} is gone or late ({said})",
                kind=ErrorKind.Communication,
                remedy="look at what it printed",
            ) from error


class Sharded:
    """`fully_shard` and `replicate`: parameters are gathered for the step's first forward and kept until its last
    gradient, which goes to the parameters' gathered copies. Microbatches add up there, in the halves of a backward as in
    a whole one; torch's own hooks would reduce after every backward, and after an input half there is nothing yet.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._options: list[tuple[Any, bool]] | None = None
        self._hooks: dict[Any, Any] = {}  # on gathered copies, by their FSDP parameter

    def _roots(self) -> list[Any]:
        """Returns the outermost sharded modules: their settings reach all within."""
        roots: list[Any] = []
        within: set[torch.nn.Module] = set()
        for module in self._module.modules():
            if _is_sharded(module) and module not in within:
                roots.append(module)
                within.update(module.modules())
        return roots

    def _groups(self, root: Any) -> list[Any]:
        states = [m._get_fsdp_state() for m in root.modules() if _is_sharded(m)]
        if states and not hasattr(states[0], "_fsdp_param_groups"):  # torch before 2.13
            return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        return [group for state in states for group in state._fsdp_param_groups]

    def begin(self) -> None:
        if self._options is None:
            self._options = [(g, g.reshard_after_backward) for root in self._roots() for g in self._groups(root)]
        for root in self._roots():
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)

    def went_forward(self) -> None:
        """Makes gradients of gathered copies add up in the dtype that they are reduced in, microbatch by microbatch. torch's hooks do so
        after a backward of the inputs, so weight halves that follow each other would add up in the copies' dtype. From 2.15 on
        autograd adds in that dtype by itself."""

        def add(parameter: Any, _: torch.Tensor) -> None:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

        for p in self._parameters():
            gathered = getattr(p, "_unsharded_param", None)  # none before the first forward
            by_hand = p.reduce_dtype is not None and hasattr(p, "accumulate_unsharded_grad_if_needed")
            if gathered is not None and by_hand and p not in self._hooks:
                self._hooks[p] = gathered.register_post_accumulate_grad_hook(functools.partial(add, p))

    def _parameters(self) -> list[Any]:
        return [p for root in self._roots() for group in self._groups(root) for p in group.fsdp_params]

    def owned(self) -> set[int]:
        """Ids of the parameters, in shards and gathered, whose gradients are for `finish` to scale."""
        both = [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in self._parameters()]
        return {id(tensor) for pair in both for tensor in pair}

    def finish(self, divisor: int) -> None:
        """Reduces what the step has accumulated, divided by the microbatches; gradients from before are added to."""
        self.end()
        shards = [p.sharded_param for p in self._parameters()]
        before = [shard.grad for shard in shards]
        for shard in shards:
            shard.grad = None
        for root in self._roots():
            for group in self._groups(root):
                group.post_backward()
            root._get_fsdp_state()._root_post_backward_final_callback()
        for shard, old in zip(shards, before):
            if shard.grad is not None and divisor > 1:
                shard.grad.div_(divisor)
            if old is not None:
                shard.grad = old if shard.grad is None else old.add_(shard.grad)

    def end(self) -> None:
        """The modules' settings as they were, whether the step went well or not."""
        for root in self._roots() if self._options is not None else ():
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
        for group, reshard in self._options or ():
            group.reshard_after_backward = reshard
        self._options = None
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class _PipelineStageBase(ChunkSteps):
    """The base class of stages: a module, a place in the pipeline, and a process group."""

    submod: torch.nn.Module  # or any callable
    reduction: Replicated | Sharded | None = None  # gradient reduction of a data parallel module, while a step runs
    finalizes = True  # whether the step that runs reduces gradients of sharded modules
    # The sources of values, for stages cut from a graph (`_C.PipeTable`); None: from the stage before.
    layout = None
    wire = ("", "")

    def __init__(
        self, submodule, stage_index: int, num_stages: int, device, group=None, dw_builder=None, recompute: str = "cheap"
    ):
        if recompute not in ("none", "cheap"):
            raise InvalidValue(f"recompute is {recompute!r}, neither 'none' nor 'cheap'")
        if not 0 <= stage_index < num_stages:
            raise InvalidValue(f"there is no stage {stage_index} among {num_stages} stages")
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group = torch.device(device), group
        self.dw_builder, self.recompute = dw_builder, recompute
        self.recomputed: dict[str, tuple[int, int]] = {}
        together = dist.is_available() and dist.is_initialized()
        self.group_rank = dist.get_rank(group) if together else 0
        self.group_size = dist.get_world_size(group) if together else 1
        if self.group_size > num_stages:
            raise Error(f"{num_stages} stages cannot be spread over a group of {self.group_size} ranks")
        self.chunks: int | None = None
        self.output_chunks: list[Any] = []
        self.stage_index_to_group_rank = {i: i % self.group_size for i in range(num_stages)}
        self._forward_contexts: OrderedDict[int, Callable[..., AbstractContextManager]] = OrderedDict()  # one at most
        self._begin_chunks()

    def chain(self) -> Any:
        """Returns the layout of stages that follow each other."""
        return _C.PipeTable.dynamic_chain(self.num_stages, self.wire)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def clear_runtime_states(self) -> None:
        self.output_chunks.clear()
        self._begin_chunks()

    def forward_maybe_with_nosync(self, *args, **kwargs):
        """Returns the module's output. Data parallel modules wait with their reduction until the step's end."""
        if isinstance(self.submod, DistributedDataParallel):
            with self.submod.no_sync():
                return self.submod(*args, **kwargs)
        output = self.submod(*args, **kwargs)
        if self.reduction is not None:
            self.reduction.went_forward()
        return output

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], AbstractContextManager[None]]
    ) -> RemovableHandle:
        """Runs every forward of the stage inside of ``context_factory(info)``, until the handle's ``remove()``. Raises `plumb.Error`
        (a RuntimeError too) if there is one already."""
        if self._forward_contexts:
            raise Error(
                f"stage {self.stage_index} has a forward context already",
                kind=ErrorKind.InvalidState,
                remedy="remove() of its handle first",
            )
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    def in_forward_context(self, microbatch: int, forward: Callable[[], Any]) -> Any:
        """Returns what `forward` returns, called inside of the registered context if there is one."""
        for context_factory in self._forward_contexts.values():
            with context_factory(PipelineStageInfo(stage_index=self.stage_index, microbatch_index=microbatch)):
                return forward()
            raise Error(
                f"the forward context of stage {self.stage_index} suppressed an exception of the forward",
                kind=ErrorKind.InvalidState,
                remedy="let it go on: __exit__ returns False",
            )
        return forward()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divides the module's gradients. Schedules do that by themselves."""
        if grad_scale_factor != 1:
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(grad_scale_factor)

    def hold_gradients(self) -> None:
        """Before a step: what sharded modules reduce after every backward waits for `reduce_gradients`."""
        self.reduction = reduction_of(self.submod)
        if self.reduction is not None:
            self.reduction.begin()

    def reduce_gradients(self, divisor: int = 1) -> None:
        """Means of the gradients over the replicas of a data parallel module, after a step. `divisor`: what sharded
        gradients are divided by, which no engine has seen yet."""
        reduction = self.reduction or reduction_of(self.submod)
        if reduction is not None and (self.finalizes or not isinstance(reduction, Sharded)):
            reduction.finish(divisor)

    def release_gradients(self) -> None:
        """After a step, also one that failed: reductions as the module's owner set them."""
        if self.reduction is not None:
            self.reduction.end()
        self.reduction = None

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.submod.named_parameters()) if isinstance(self.submod, torch.nn.Module) else []

    def own_module(self) -> Any:
        """Returns the module without what replicates or compiles it."""
        return unwrapped(self.submod)

    def state_on_cpu(self) -> dict[str, torch.Tensor]:
        """The module's ``state_dict`` in plain tensors on the CPU. All ranks that share a sharded module must ask."""
        module = self.own_module()
        state = module.state_dict() if isinstance(module, torch.nn.Module) else {}
        return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu() for n, t in state.items()}

    def summed_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Those whose gradients a step adds up: all but the ones that a sharded module keeps for itself."""
        reduction = self.reduction or reduction_of(self.submod)
        owned = reduction.owned() if reduction is not None else ()
        return [(name, p) for name, p in self.named_parameters() if id(p) not in owned]


@checked
class PipelineStage(_PipelineStageBase):
    """A module as a stage of a pipeline whose stages follow each other.

    The module's result is the argument of the next stage's module: a tensor, a tuple or list of them, or any
    nesting of tuples, lists, dicts, tensors, numbers, strings and None (a tuple or list is passed as positional
    arguments, anything else as one). Keyword arguments come from every rank's own ``step(**kwargs)``. Shapes and dtypes
    may change from microbatch to microbatch; nothing is run beforehand to learn them.

    Args:
        submodule: the module, or any callable.
        stage_index, num_stages: its place.
        device: where it runs.
        input_args, output_args: example tensors; a warning says where the first microbatch differs from them.
        output_grads, input_grads: taken for compatibility.
        group: the ranks of the pipeline; None: all of them. A process alone needs no group.
        dw_builder: called after a stage's backward, returns a callable that does the rest of the weight gradients; it
            runs where the schedule has the weight half.
        get_mesh: taken for compatibility.
        recompute: ``"cheap"``: the backward computes results of gelu, norms, casts and the like again instead of keeping
            them, with the same bits; ``"none"``: it keeps everything. After a step, ``recomputed`` says what one
            microbatch did not keep: ``{operator: (results, bytes)}``.
        wire: ``("e4m3fn", "e5m2")``: formats of this stage's inputs and outputs, values and gradients, the same on
            every stage; all floating-point values are rounded to them, and travel as codes between processes.
        tied: ``{"head.weight": "embedding"}``: parameters of this module that are copies of others; equal names on
            other stages tie them. Their gradients are summed over the copies after every step.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        input_grads: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable | None = None,
        *,
        tied: dict[str, str] | None = None,
        recompute: str = "cheap",
        wire: Wire | None = None,
    ):
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder, recompute)
        self.wire = wire_texts(wire)
        self.chain()  # refuses formats
        self.tied = dict(tied or {})
        unknown = self.tied.keys() - {name for name, _ in self.named_parameters()}
        if unknown:
            raise InvalidValue(f"stage {stage_index} has no parameter {sorted(unknown)} that could be tied")
        self._expected = {"input": self._metas_of(input_args), "output": self._metas_of(output_args)}

    @staticmethod
    def _metas_of(values: Any) -> list | None:
        values = values if isinstance(values, (tuple, list)) or values is None else (values,)
        return values and [(list(v.shape), v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in values]

    def check_example(self, what: str, values) -> None:
        """Warns once if the first microbatch's values are not like the examples."""
        expected, self._expected[what] = self._expected.get(what), None
        if expected is not None and expected != (actual := self._metas_of(values)):
            warnings.warn(f"stage {self.stage_index}: the {what}s are {actual}, the examples said {expected}", stacklevel=2)


def build_stage(
    stage_module: torch.nn.Module, stage_index: int, pipe_info, device: torch.device, group=None, *, recompute: str = "cheap"
) -> _PipelineStageBase:
    """Returns the stage of a cut model (`Pipe.info()`) around `stage_module`, which may have been changed meanwhile.
    `recompute`: as for `PipelineStage`."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group, recompute)


_METHODS = {"run_values", "forward_maybe_with_nosync", "_run_function"}  # that take part in a forward


class _PipelineStage(_PipelineStageBase):
    """A stage cut from a graph: its inputs are model inputs and outputs of any stages before it."""

    def __init__(self, stage_module, stage_index, pipe_info, device, group=None, recompute="cheap"):
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group, recompute=recompute)
        self.pipe_info = pipe_info
        if pipe_info.table is None:
            raise Error("the pipe was made by hand", kind=ErrorKind.Unsupported, remedy="its own build_stage()")
        self.layout = pipe_info.table
        if self.group_size > 1:
            getattr(pipe_info, "stages_here", set()).add(stage_index)
        if isinstance(stage_module, torch.nn.Module) and not any(p.is_meta for p in stage_module.parameters()):
            stage_module.to(self.device)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        module = self.own_module()
        return list(module.named_parameters()) if isinstance(module, torch.nn.Module) else []

    def summed_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        summed = super().summed_parameters()
        copied = [copies for copies in self.layout.replicated if self.stage_index in copies]
        sharded = {name for name, _ in self.named_parameters()} - {name for name, _ in summed} if copied else set()
        for copies in copied:
            if copies[self.stage_index] in sharded:
                raise Error(
                    f"'{copies[self.stage_index]}' is used in stages {sorted(copies)}, and stage {self.stage_index} has it sharded",
                    kind=ErrorKind.Unsupported,
                    remedy="leave the module that holds it out of fully_shard, or replicate the stage by DistributedDataParallel",
                )
        return summed

    def graph_alone(self) -> Any:
        whole = type(self) is _PipelineStage and type(self.submod) is StageModule
        whole = whole and not self._runtime_validate and not self._forward_contexts
        return self.submod.graph_alone() if whole and not _METHODS & self.__dict__.keys() else None

    def written_state(self) -> list[tuple[str, torch.Tensor]]:
        with contextlib.suppress(Exception):  # which the forward raises in its place
            return self.submod._stage_now().written_state() if type(self.submod) is StageModule else []
        return []

    def run_values(self, values: list, sizes: Sizes) -> Any:
        """Returns the module's output for a microbatch whose model inputs have these sizes; none: as they were cut."""
        if sizes and not isinstance(self.submod, torch.nn.Module):
            raise Error(
                f"stage {self.stage_index} is a function, and cannot be told that a microbatch has other sizes than it was cut for",
                kind=ErrorKind.Unsupported,
                remedy="put the stage's module into a torch.nn.Module",
            )
        with at_sizes(sizes):
            return self.forward_maybe_with_nosync(*values)

    def model_inputs(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor | None]:
        """Returns the whole model's flat inputs for a microbatch: None for what is not given here."""
        flat, known = self.pipe_info.flat_inputs(args, kwargs), self.pipe_info.plain_inputs is not None
        return [v if v is None or isinstance(v, torch.Tensor) else None if known else torch.tensor(v) for v in flat]
