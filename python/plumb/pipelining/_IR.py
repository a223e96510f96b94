"""`pipeline`: a model cut into stages, and `Pipe`, what comes of it."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import _C
from .._capture import GraphModule
from .._exported import save_pt2
from .._state import BUFFER, PARAMETER
from ._backward import _null_coalesce_accumulate, stage_backward  # noqa: F401
from ._errors import InvalidValue
from ._fx_graphs import (  # noqa: F401  (known under this module's name)
    _direct_serialization_deserialize,
    _direct_serialization_reduce,
    _find_loss_from_output_and_spec,
    _find_loss_output,
    _insert_stage_symbolic_backward,
    _LinearNodeList,
    _modify_graph_op_device,
    _move_placeholders_to_front,
    _NodeReference,
    _number_and_count_forward_stages,
    _split_after_forward,
    _split_before_forward,
)
from ._marks import (  # noqa: F401  (known under this module's name)
    PipeSplitWrapper,
    SplitPoint,
    annotate_split_points,
    aten_pipe_split_alias,
    pipe_split,
)
from ._policies import SplitPolicy, make_policy
from ._sources import Source, from_exported, make_source
from ._specialize import CutSizes, StageGraphs, make_specializer
from ._specs import MultiUseParameterConfig, MultiUseParamSpec, find_loss_spec, multi_use_arguments, plain_loss_spec  # noqa: F401
from ._split_graph import (  # noqa: F401
    PP_SUBMOD_PREFIX,
    DetachExecutor,
    get_submod_name,
    split_module,
    sync_stages,
    top_graph,
)
from ._stage_module import StageModule
from ._unflatten import _outline_submodules  # noqa: F401
from ._utils import PipeInfo
from ._wrappers import LossWrapper, PipeSequential, TrivialLossWrapper  # noqa: F401
from .stage import _PipelineStage


def _names(engine: Any, stage: int) -> list[str] | None:
    """Of a stage's tensors; None if the cut has no such stage."""
    return [name for name, *_ in engine.stage(stage).state()] if stage < engine.num_stages else None


class Pipe(nn.Module):
    """A model cut into stages. Made by `pipeline`.

    Called like the model, it runs stage after stage in this process, bit for bit the model, and returns the model's
    outputs as a flat tuple (``unflatten`` gives them the model's structure). With a loss a call also runs the
    backward and adds to the parameters' ``.grad``.

    Attributes: ``num_stages``; ``has_loss_and_backward``; ``loss_spec``; ``split_gm``, a ``torch.fx`` module whose
    graph is the picture of the pipe and whose children ``submod_pp_0``, ... are the stages; ``replicated_params``, one
    dict for every parameter with several copies, from ``submod_pp_N`` to its name there; ``notes``, what was not asked
    for (cuts that were moved).
    """

    def __init__(
        self, engine: Any, source: Source, loss_spec: Any = None, cut_arguments: dict | None = None, specializer: Any = None
    ):
        super().__init__()
        table = engine.table
        self.num_stages: int = engine.num_stages
        self.has_loss_and_backward = table.loss_output is not None
        self.loss_spec = loss_spec
        self.notes: list[str] = [*source.notes, *engine.notes]
        specializer = specializer or make_specializer(engine, source, cut_arguments)
        self.__dict__.update(_engine=engine, _source=source, _cut_arguments=cut_arguments, _specializer=specializer)
        cut_sizes = CutSizes(table)
        stages = [
            StageModule(
                engine.stage(s), s, table, source.arguments, source.training,
                StageGraphs(s, table, cut_sizes, specializer, source.other_sizes),
            )
            for s in range(self.num_stages)
        ]  # fmt: skip
        self._devices = [stage.device for stage in stages]
        self._make_split_gm(stages)
        self.replicated_params: list[dict[str, str]] = [
            {get_submod_name(s): name for s, name in sorted(copies.items())} for copies in table.replicated
        ]
        self.training = source.training

    def _make_split_gm(self, stages: list[StageModule]) -> None:
        engine = self._engine
        steps = engine.backward_steps() if self.has_loss_and_backward else None
        graph = top_graph(engine.input_names, engine.table, steps)
        self.split_gm = split_module(graph, stages)
        self.split_gm.__dict__["_pipe_ref"] = weakref.ref(self)

    # --- running ---
    def _sync(self) -> None:
        sync_stages(self._stages(), self._engine, self._devices)

    def _stages(self) -> list[StageModule]:
        return [self.split_gm._modules[get_submod_name(s)] for s in range(self.num_stages)]

    def _outputs(self, flat: list) -> tuple:
        return tuple(o if p is None else p for o, p in zip(flat, self._source.plain_outputs))

    def forward(self, *args: Any, **kwargs: Any) -> tuple:
        flat = self._source.flatten(args, kwargs)
        self._sync()
        engine = self._engine_for(flat, args, kwargs)
        if self.has_loss_and_backward and torch.is_grad_enabled():
            return self._outputs(engine.run_with_backward(flat)[0])
        return self._outputs(engine.run(flat))

    def _engine_for(self, flat: list, args: tuple, kwargs: dict) -> Any:
        """A graph is made for one signature: for other sizes a live model is captured and cut again, once for each, with
        the stages' tensors. What cannot be done so is refused by the engine itself."""
        source, sizes = self._source, self._source.sizes(flat)
        if source.again is None or not source.example or sizes == source.sizes(source.example):
            return self._engine
        others = self.__dict__.setdefault("_engines", {})
        if sizes not in others:
            other = source.again(args, kwargs)
            cut = other and _C.cut(other.engine, **self._cut_arguments)
            if not cut or any(_names(cut, s) != _names(self._engine, s) for s in range(max(cut.num_stages, self.num_stages))):
                return self._engine
            others[sizes] = cut
        for s, device in enumerate(self._devices):
            for name, _, tensor, _ in self._engine.stage(s).state():
                others[sizes].stage(s).set_state(name, tensor)
            if device is not None:
                others[sizes].move_stage(s, device)
        return others[sizes]

    def unflatten(self, outputs: tuple) -> Any:
        """A call's flat outputs in the structure that the model returns."""
        return self._source.unflatten(list(outputs))

    @property
    def executor(self) -> DetachExecutor:
        return DetachExecutor(self)

    # --- stages ---
    def get_stage_module(self, stage_idx: int) -> StageModule:
        """A stage as a module. Raises `plumb.Error` (a ValueError too) if there is none of that number."""
        if not 0 <= stage_idx < self.num_stages:
            raise InvalidValue(f"Invalid stage index {stage_idx}: stages count from 0 to {self.num_stages - 1}")
        return self.split_gm._modules[get_submod_name(stage_idx)]

    def build_stage(
        self, stage_index: int, device: torch.device, group: Any = None, *, recompute: str = "cheap"
    ) -> Any:
        """The stage for a schedule to run, moved to `device` with its device arguments. `recompute`: as for
        `PipelineStage`."""
        module = self.get_stage_module(stage_index).to(device)
        return _PipelineStage(module, stage_index, self.info(), torch.device(device), group, recompute)

    def info(self) -> PipeInfo:
        """What every rank has to know. It keeps none of the stages alive."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.split_gm.graph, {}))
        return PipeInfo(
            graph, self.num_stages, self.has_loss_and_backward, self._engine.table, list(self._source.arguments)
        )

    def serialize_stage(self, stage_index: int) -> bytes:
        """A stage with its weights and its place in the pipe as bytes: see `deserialize_stage`."""
        self.get_stage_module(stage_index)
        self._sync()
        return self._engine.serialize_stage(stage_index)

    # --- the whole model again ---
    def _merged(self, stage_states: list[Mapping[str, Tensor]] | None) -> None:
        for stage, state in zip(self._stages(), stage_states or []):
            stage.load_state_dict(state)
        self._sync()

    def merge_state_dict(self, stage_states: list[Mapping[str, Tensor]] | None = None) -> OrderedDict[str, Tensor]:
        """The whole model's ``state_dict``: names and order as before the cut, tied names tied, tensors shared with the
        stages. `stage_states`: the stages' ``state_dict`` as trained on their ranks, loaded first.

        Raises `plumb.Error` naming a replicated parameter whose copies differ.
        """
        self._merged(stage_states)
        state = self._engine.merged_state()
        return OrderedDict((n, t) for n, kind, t, kept in state if kind == PARAMETER or (kind == BUFFER and kept))

    def merge(self, stage_states: list[Mapping[str, Tensor]] | None = None) -> GraphModule:
        """The undivided model as a `plumb.GraphModule`, with the stages' tensors and without marks."""
        self._merged(stage_states)
        source = self._source
        engine = self._engine.merge()
        plain_inputs = None if source.takes_plain else source.plain_inputs
        merged = GraphModule(
            engine, source.in_spec, source.out_spec, plain_inputs, source.plain_outputs, [], source.program, source.training
        )
        merged.training = self.training
        return merged

    def save_pt2(self, path: str | os.PathLike, stage_states: list[Mapping[str, Tensor]] | None = None) -> None:
        """The undivided model as a ``.pt2`` file. What a file knew that it was cut from (ranges of sizes, sample
        inputs) is kept."""
        save_pt2(self.merge(stage_states), path)

    # --- to look at ---
    def print_readable(self, print_output: bool = True) -> str:
        """Prints the top graph, what flows between the stages, the backward, and every stage's graph; answers the text."""
        self._sync()
        text = self._engine.print_readable()
        if print_output:
            print(text)
        return text

    def cost_report(self) -> str:
        """A table of what every stage costs, estimated from shapes: time, messages, memory."""
        return self._engine.cost_report()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

    # --- copies: the undivided model, where it was cut, and every stage's tensors ---
    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._sync()
        whole = self._source.engine
        stages = [self._engine.stage(s).state() for s in range(self.num_stages)]
        source = replace(self._source, engine=None, example=None, again=None)
        parts = (whole.graph.to_string(), whole.state(), *whole.specs())
        where = (stages, self._devices, self.training, self._specializer)
        return _rebuild, (parts, source, self._cut_arguments, self.loss_spec, *where)

    # --- as torch's ---
    _number_and_count_forward_stages = staticmethod(_number_and_count_forward_stages)

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
        *,
        multi_use_param_spec: MultiUseParamSpec | None = None,
        output_loss_value_spec: Any = None,
    ) -> Pipe:
        """`pipeline` for a model that is marked already."""
        return pipeline(
            mod, example_args, example_kwargs, split_policy=split_policy, multi_use_param_spec=multi_use_param_spec,
            output_loss_value_spec=output_loss_value_spec,
        )  # fmt: skip

    @staticmethod
    def _from_traced(
        mod: nn.Module | None,
        exported_program: torch.export.ExportedProgram,
        multi_use_param_spec: MultiUseParamSpec | None = None,
        output_loss_value_spec: Any = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """Cuts an exported program; `mod` only says whether it is a `TrivialLossWrapper`."""
        source = from_exported(exported_program, (), {})
        loss = find_loss_spec(mod, source, output_loss_value_spec)
        return _cut(source, None, split_policy, None, multi_use_param_spec, loss, True)


def _cut(
    source: Source, spec: Any, policy: Any, num_stages: int | None, multi_use: Any, loss: Any, move_cuts: bool
) -> Pipe:
    where: dict[str, Any] = {}
    if policy is not None:
        where = make_policy(policy, num_stages).cuts(source)
    elif spec:
        where = {"modules": [(name, SplitPoint[point.name] is SplitPoint.END) for name, point in spec.items()]}
    plain = None if loss is None else plain_loss_spec(loss, source.out_spec)
    arguments = {**where, **multi_use_arguments(multi_use), "move_cuts": move_cuts, "loss": plain}
    return Pipe(_C.cut(source.engine, **arguments), source, loss, arguments)


def _rebuild(
    parts: tuple, source: Source, arguments: dict, loss: Any, stages: list, devices: list, training: bool, specializer: Any
) -> Pipe:
    """A pipe's copy: cut again at the same places, with the stages' own tensors."""
    source.engine = _C.GraphModule(*parts)
    engine = _C.cut(source.engine, **arguments)
    for s, state in enumerate(stages):
        for name, _, tensor, _ in state:
            engine.stage(s).set_state(name, tensor)
        if devices[s] is not None:
            engine.move_stage(s, devices[s])
    return Pipe(engine, source, loss, arguments, specializer).train(training)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | SplitPolicy | str | None = None,
    *,
    num_stages: int | None = None,
    multi_use_param_spec: MultiUseParamSpec | None = None,
    output_loss_value_spec: Any = None,
    move_cuts: bool = True,
) -> Pipe:
    """Cuts a model into stages.

    Args:
        module: a ``torch.nn.Module``, a `plumb.GraphModule`, an exported program, or the path of a ``.pt2`` file. It is
            left as it is; the stages share its tensors.
        mb_args, mb_kwargs: example inputs of one microbatch; a graph or file needs none (but a measured cut does).
        split_spec: names of modules and where to cut there. Without it, at the `pipe_split` marks in the forward.
        split_policy: a function that puts marks into the model's ``torch.fx`` graph, a policy object (`Balanced`,
            `split_into_equal_size`, `split_on_size_threshold`, `StagePolicy`), or "balanced", "estimated", "equal_size".
        num_stages: for policies by name; else checked, if given.
        multi_use_param_spec: what becomes of a parameter that several stages use, for all or by full name. Default:
            REPLICATE.
        output_loss_value_spec: the outputs' structure with True for the loss and False elsewhere; "auto" for an output
            "loss". The pipe then has a backward.
        move_cuts: whether a cut through memory that is written may move to where it is right (said in ``notes``).

    Cuts before the first and after the last operator, and cuts next to each other, make no empty stages.

    Stages of a live module take other sizes than the example's, batch and length, in schedules and called one after the
    other; it is captured and cut again for each size. For that it has to live: keep it (``module.to("meta")`` lets go of
    its memory and not of the stages'). Those of a program follow its dynamic shapes. Raises `plumb.Error`.
    """
    if split_spec is not None and split_policy is not None:
        raise InvalidValue("Cannot specify both `split_spec` and `split_policy`", remedy="one of them")
    source, spec = make_source(module, mb_args, mb_kwargs, split_spec)
    loss = find_loss_spec(module, source, output_loss_value_spec)
    pipe = _cut(source, spec, split_policy, num_stages, multi_use_param_spec, loss, move_cuts)
    if num_stages is not None and pipe.num_stages != num_stages:
        raise InvalidValue(f"the cuts give {pipe.num_stages} stages instead of {num_stages}")
    return pipe


def deserialize_stage(data: bytes) -> tuple[StageModule, PipeInfo]:
    """A stage from `Pipe.serialize_stage`, on the CPU, and the picture of its pipe. The bytes may come from anywhere:
    damaged ones raise `plumb.Error`."""
    parts = _C.deserialize_stage(data)
    table = parts["table"]
    names = [(name, 0) for name in parts["input_names"]]
    stage = StageModule(parts["engine"], parts["index"], table, names, parts["training"])
    info = PipeInfo(top_graph(parts["input_names"], table, None), table.num_stages, table.loss_output is not None, table)
    return stage, info
