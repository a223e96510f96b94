"""`pipeline`, which cuts a model into stages, and its result, `Pipe`."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import _C
from .._arguments import checked
from .._capture.custom_functions import refuse_holders
from .._errors import Error, ErrorKind
from .._exported import save_pt2
from .._graph_module import GraphModule
from .._state import BUFFER, CONSTANT, PARAMETER, sync_state
from .._trees import unflatten
from .._unit_scaled import add_mark
from ..transforms._report import Report
from ._backward import _null_coalesce_accumulate, stage_backward  # noqa: F401
from ._marks import (  # noqa: F401  (known under this module's name)
    LossWrapper,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    aten_pipe_split_alias,
    pipe_split,
)
from ._sources import (  # noqa: F401
    MultiUseParameterConfig,
    MultiUseParamSpec,
    Source,
    SplitPolicy,
    find_loss_spec,
    from_exported,
    make_policy,
    make_source,
    multi_use_arguments,
    plain_loss_spec,
)
from ._split_graph import (  # noqa: F401
    PP_SUBMOD_PREFIX,
    DetachExecutor,
    _insert_stage_symbolic_backward,
    _modify_graph_op_device,
    _number_and_count_forward_stages,
    check_chain,
    get_submod_name,
    log_cut,
    logger,
    refuse_to_run,
    shared_parameters,
    split_module,
    stage_calls,
    top_graph,
)
from ._stage_module import Sizes, StageModule, deserialize_stage, put_parameter, scatter_stages, share_copies  # noqa: F401
from ._utils import InvalidValue, PipeInfo, Wire, wire_texts
from ._variants import make_variants
from .stage import PipelineStage, _PipelineStage, _PipelineStageBase


def _gone() -> None:
    """The model of what was pickled."""


def _sizes(flat: list) -> Sizes:
    return {i: tuple(x.shape) for i, x in enumerate(flat) if isinstance(x, Tensor)}


def known_device(device: Any) -> torch.device:
    """Returns a device of this machine, with its number."""
    try:
        return torch.empty(0).to(device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise Error(f"there is no device {device!r} here: {why}", remedy='"cpu", or a device of this machine: "cuda:0"') from None


class Pipe(nn.Module):
    """Stages, and the graph that calls them. `pipeline` makes one of a model (a `CutPipe`); this constructor takes a graph of
    stages made by hand.

    Args:
        split_gm: its graph calls the children in order and takes parts of what they return, and nothing else but the
            backward (`stage_backward` calls). A parameter that several stages hold stays one.
        num_stages: how many calls there are.
        has_loss_and_backward, loss_spec: whether the graph has a backward, and which output is the loss.

    A call runs the graph by a `DetachExecutor`. Raises `plumb.Error` for a graph that is none of stages.
    """

    def __init__(self, split_gm: fx.GraphModule, num_stages: int, has_loss_and_backward: bool, loss_spec: Any):
        super().__init__()
        calls = stage_calls(split_gm.graph)
        if len(calls) != num_stages:
            raise InvalidValue(f"the graph calls {len(calls)} stages, not {num_stages}")
        self.split_gm, self.num_stages, self.loss_spec = split_gm, num_stages, loss_spec
        self.has_loss_and_backward = has_loss_and_backward
        self.replicated_params: list[dict[str, str]] = shared_parameters(split_gm)
        split_gm.forward = refuse_to_run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.executor.run(*args, **kwargs)

    @property
    def executor(self) -> DetachExecutor:
        return DetachExecutor(self.split_gm)

    def _stages(self) -> list[nn.Module]:
        return [self.split_gm.get_submodule(call.target) for call in stage_calls(self.split_gm.graph)]

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Returns a stage as a module. Raises `plumb.Error` (a ValueError too) if there is none of that number."""
        if not 0 <= stage_idx < self.num_stages:
            raise InvalidValue(f"Invalid stage index {stage_idx}: stages count from 0 to {self.num_stages - 1}")
        return self._stages()[stage_idx]

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: Any = None, *, recompute: str = "cheap"
    ) -> _PipelineStageBase:
        """Returns the stage for a schedule to run, moved to `device` with its device arguments. `recompute`: as for
        `PipelineStage`. Raises `plumb.Error` for a graph made by hand whose stages are no chain."""
        check_chain(self.split_gm.graph)
        module = self.get_stage_module(stage_index).to(known_device(device))
        if isinstance(module, fx.GraphModule):
            _modify_graph_op_device(module, torch.device(device))
        return PipelineStage(module, stage_index, self.num_stages, device, group=group, recompute=recompute)

    def info(self) -> PipeInfo:
        """Returns the description of the pipe that every rank needs. It keeps none of the stages alive."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.split_gm.graph, {}))
        return PipeInfo(graph, self.num_stages, self.has_loss_and_backward)

    def print_readable(self) -> str:
        """Prints the graph and every stage's; returns the text."""
        return self.split_gm.print_readable()

    def __str__(self) -> str:
        return str(self.split_gm)

    def __repr__(self) -> str:
        return repr(self.split_gm)

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
    ) -> CutPipe:
        """`pipeline` for a model that is marked already."""
        return pipeline(
            mod, example_args, example_kwargs, split_policy=split_policy, multi_use_param_spec=multi_use_param_spec,
            output_loss_value_spec=output_loss_value_spec,
        )  # fmt: skip

    @staticmethod
    def _trace_with_export(
        mod: nn.Module, example_args: tuple[Any, ...], example_kwargs: dict[str, Any] | None = None
    ) -> torch.export.ExportedProgram:
        """`torch.export.export`. Raises `plumb.Error` for a model that it cannot capture; `pipeline` does without it."""
        logger.info("Tracing model ...")
        try:
            return torch.export.export(mod, example_args, example_kwargs)
        except Exception as error:
            raise Error(
                "It seems that we cannot capture your model as a full graph: torch.export.export failed. Typical reasons "
                "are graph breaks, control flow that depends on data or shapes, and custom operators without a meta kernel",
                kind=ErrorKind.Capture,
                remedy="pipeline(model, ...), which captures without torch.export; or a PipelineStage for each part",
            ) from error

    @staticmethod
    def _from_traced(
        mod: nn.Module | None,
        exported_program: torch.export.ExportedProgram,
        multi_use_param_spec: MultiUseParamSpec | None = None,
        output_loss_value_spec: Any = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> CutPipe:
        """Cuts an exported program; `mod` only says whether it is a `TrivialLossWrapper`."""
        source = from_exported(exported_program, (), {})
        loss = find_loss_spec(mod, source, output_loss_value_spec)
        return _cut(source, None, split_policy, None, multi_use_param_spec, loss, True)


class CutPipe(Pipe):
    """A model cut into stages. Made by `pipeline`.

    Called like the model, it runs stage after stage in this process, bit for bit the model, and returns the model's
    outputs as a flat tuple (``unflatten`` gives them the model's structure). With a loss a call also runs the
    backward and adds to the parameters' ``.grad``.

    Attributes: ``num_stages``; ``has_loss_and_backward``; ``loss_spec``; ``split_gm``, a ``torch.fx`` module whose
    graph is the picture of the pipe and whose children ``submod_pp_0``, ... are the stages; ``replicated_params``, one
    dict for every parameter with several copies, from ``submod_pp_N`` to its name there; ``notes``, what was not asked
    for (cuts that were moved).
    """

    weights: Any = None  # `plumb.hf.Weights`: gives a stage its tensors' values when it is built

    def __init__(
        self, engine: Any, source: Source, loss_spec: Any = None, cut_arguments: dict | None = None, variants: Any = None
    ):
        table = engine.table
        variants = variants or make_variants(engine, source, cut_arguments)
        whole = source.module
        training = whole._made_in_training
        about = (source.arguments, training, variants, source.other_sizes, whole._autocast, source.structures)
        stages = [StageModule(engine.stage(s), s, table, *about) for s in range(engine.num_stages)]
        has_loss = table.loss_output is not None
        graph = top_graph(engine.input_names, table, has_loss)
        super().__init__(split_module(graph, stages), engine.num_stages, has_loss, loss_spec)
        self.split_gm.__dict__["_pipe_ref"] = weakref.ref(self)
        self.__dict__.update(_engine=engine, _source=source, _cut_arguments=cut_arguments, _variants=variants)
        self.notes: list[str] = [*source.module.notes, *engine.notes]
        self._stages_here: set[int] = set()  # that were built for a schedule over several ranks
        self._devices = [stage.device for stage in stages]
        self.replicated_params: list[dict[str, str]] = [
            {get_submod_name(s): name for s, name in sorted(copies.items())} for copies in table.replicated
        ]
        self.training = training

    def _share_copies(self) -> None:
        share_copies(self._stages(), self._engine.table.replicated)

    # --- running ---
    def _sync(self) -> None:
        """Tells the engine what happened to the stages in Python: replaced tensors, and moves to other devices."""
        for s, stage in enumerate(self._stages()):
            stage.check_call()
            sync_state(stage._engine, stage._slots)  # tensors that the Python module has got meanwhile
            if stage.device is not None and stage.device != self._devices[s]:
                self._engine.move_stage(s, stage.device)
                self._devices[s] = stage.device

    def flat_inputs(self, args: tuple, kwargs: dict) -> list:
        """Returns a call's inputs as ``split_gm``'s graph takes them; None for what is no tensor."""
        self._sync()
        return self._source.flatten(args, kwargs)

    def plain_outputs(self, flat: list, source: Source | None = None) -> tuple:
        """Returns the outputs of ``split_gm``'s graph, with the model's outputs that are no tensors in it."""
        return tuple(o if p is None else p for o, p in zip(flat, (source or self._source).module._plain_outputs))

    def forward(self, *args: Any, **kwargs: Any) -> tuple:
        flat = self.flat_inputs(args, kwargs)
        engine, source = self._engine_for(flat)
        backward = self.has_loss_and_backward and torch.is_grad_enabled()
        return self.plain_outputs(engine.run_with_backward(flat) if backward else engine.run(flat), source)

    def _engine_for(self, flat: list) -> tuple[Any, Source]:
        """Returns the engine for one signature: with the graphs of the stages for these sizes, modes, ..."""
        if self._variants is None:
            return self._engine, self._source
        variant, sizes = self._variant(), _sizes(flat)
        if sizes == _sizes(variant.source.example):
            sizes = {}
        if not sizes and variant is self._variants.base:
            return self._engine, variant.source
        try:
            return self._engine.with_stages([stage.graph_for(sizes) for stage in self._stages()]), variant.source
        except Error:
            if not self._variants.is_gone():
                raise
            return self._engine, variant.source  # which refuses these sizes

    def _variant(self) -> Any:
        """Returns the variant that all stages are to run."""
        stages, variants = self._stages(), self._variants
        facts = [(stage.training if variants.depends_on_mode else self.training, stage.dtypes()) for stage in stages]
        if any(f != facts[0] for f in facts):
            raise Error(
                "the stages are not alike: some were set to another training mode or dtype than the others",
                kind=ErrorKind.InvalidState,
                remedy="set them together: pipe.eval(), pipe.to(dtype)",
            )
        return variants.current(*facts[0])

    def unflatten(self, outputs: tuple) -> Any:
        """Returns a call's flat outputs in the structure that the model returns."""
        return unflatten(outputs, self._source.module._out_spec)

    # --- stages ---
    def build_stage(
        self, stage_index: int, device: torch.device | str, group: Any = None, *, recompute: str = "cheap"
    ) -> _PipelineStageBase:
        module, stages = self.get_stage_module(stage_index), self._stages()
        if self.weights is not None:
            self.weights.read_into(module)
            self._share_copies()
        device = known_device(device)
        for copies in self._engine.table.replicated:  # stages on several devices have one each
            others = [stages[s].moved_to for s in copies if s != stage_index]
            if stage_index in copies and any(other not in (None, device) for other in others):
                put_parameter(module, copies[stage_index])
        module.to(device)
        return _PipelineStage(module, stage_index, self.info(), device, group, recompute)

    def info(self) -> PipeInfo:
        told = {"table": self._engine.table, "stages_here": self._stages_here}
        return replace(super().info(), **told, **self._source.call())

    def serialize_stage(self, stage_index: int) -> bytes:
        """Returns a stage with its weights and its place in the pipe as bytes: see `deserialize_stage`."""
        self.get_stage_module(stage_index)
        self._sync()
        return self._engine.serialize_stage(stage_index)

    # --- the whole model again ---
    def _merged(self, stage_states: Sequence[Mapping[str, Tensor]] | None) -> None:
        """Puts states into the stages. Those of copies of one parameter stay apart until the engine has compared them."""
        elsewhere = sorted(set(range(self.num_stages)) - self._stages_here) if self._stages_here else []
        if stage_states is None and elsewhere:
            raise Error(
                f"the model cannot be merged: stages {elsewhere} run on other ranks, and are here as they were cut",
                kind=ErrorKind.InvalidState,
                remedy="states = schedule.gather_stage_states() on every rank, then pipe.merge_state_dict(states)",
            )
        stages = self._stages()
        if stage_states is not None:
            wrong = next((type(state).__name__ for state in stage_states if not isinstance(state, Mapping)), "")
            if wrong or len(stage_states) != self.num_stages:
                raise Error(
                    f"a state is a {wrong}" if wrong else f"{len(stage_states)} states are given for {self.num_stages} stages",
                    remedy="a state_dict for each stage, as schedule.gather_stage_states() returns them",
                )
        for copies in self._engine.table.replicated if stage_states is not None else []:
            for s, name in sorted(copies.items())[1:]:
                put_parameter(stages[s], name)
        for stage, state in zip(stages, stage_states or []):
            stage.load_state_dict(state)
        self._sync()

    def merge_state_dict(self, stage_states: Sequence[Mapping[str, Tensor]] | None = None) -> OrderedDict[str, Tensor]:
        """Returns the whole model's ``state_dict``: names and order as before the cut, tied names tied, plain tensors
        that share their memory with the stages'. `stage_states`: the stages' ``state_dict`` as trained on their ranks,
        loaded first; over several ranks ``schedule.gather_stage_states()`` returns it.

        Raises `plumb.Error` naming a replicated parameter whose copies differ, or the stages that run on other ranks if
        no states are given.
        """
        self._merged(stage_states)
        state = self._engine.merged_state()
        self._share_copies()
        plain: dict[int, Tensor] = {}  # as torch's state_dict(): no parameters, which torch.load would not take
        merged = OrderedDict(
            (n, plain.setdefault(id(t), t.detach()))
            for n, kind, t, kept in state
            if kind == PARAMETER or (kind == BUFFER and kept)
        )
        if self._source.unit_scaled:
            add_mark(merged)
        return merged

    def merge(self, stage_states: Sequence[Mapping[str, Tensor]] | None = None) -> GraphModule:
        """Returns the undivided model as a `plumb.GraphModule`, with the stages' tensors and without marks."""
        self._merged(stage_states)
        engine = self._engine.merge()
        self._share_copies()
        merged = self._source.module.on(engine).train(self.training)
        merged.notes = []
        return merged

    def save_pt2(self, path: str | os.PathLike, stage_states: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Writes the undivided model as a ``.pt2`` file. Keeps ranges of sizes and sample inputs of its own file."""
        save_pt2(self.merge(stage_states), path)

    # --- to look at ---
    def print_readable(self, print_output: bool = True) -> str:
        """Prints the top graph, what flows between the stages, the backward, and every stage's graph; returns the text."""
        self._sync()
        backward = [node.format_node() for node in self.split_gm.graph.nodes if node.target is stage_backward]
        text = "\n".join([self._engine.print_readable(), *backward])
        if print_output:
            print(text)
        return text

    def wire_report(self) -> Report:
        """The values that cross between stages, their formats and bytes of one microbatch; the title has the sum."""
        return Report([self._engine.table.wire_report()])

    def cost_report(self) -> str:
        """Returns a table of what every stage costs, estimated from shapes: time, messages, memory."""
        return self._engine.cost_report()

    # --- copies: the undivided model, where it was cut, and every stage's tensors ---
    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._sync()
        stages = [self._engine.stage(s).state() for s in range(self.num_stages)]
        source = replace(self._source, example=None, again=None, model=_gone, guards=None)
        where = (stages, self._devices, self.training, self._variants)
        return _rebuild, (source, self._cut_arguments, self.loss_spec, *where)

def _cut(
    source: Source, spec: Any, policy: Any, num_stages: int | None, multi_use: Any, loss: Any, move_cuts: bool,
    wire: Wire | None = None, wire_exclude: Sequence[str] = (),
) -> CutPipe:  # fmt: skip
    refuse_holders(source.module.graph, "cut")
    where: dict[str, Any] = {}
    if policy is not None:
        logger.info("Auto-splitting model")
        where = make_policy(policy, num_stages).cuts(source)
    elif spec:
        where = {"modules": [(name, SplitPoint[point.name] is SplitPoint.END) for name, point in spec.items()]}
    plain = None if loss is None else plain_loss_spec(loss, source.module._out_spec)
    # The caller decides about parameters of several stages, else a plan does.
    arguments = {**where, **multi_use_arguments(multi_use, source), "move_cuts": move_cuts, "loss": plain}
    arguments |= {"wire": wire_texts(wire), "wire_exclude": list(wire_exclude)}
    pipe = CutPipe(_C.cut(source.engine, **arguments), source, loss, arguments)
    pipe._share_copies()
    log_cut(pipe, [name for name, *_ in source.engine.state()])
    return pipe


def _rebuild(
    source: Source, arguments: dict, loss: Any, stages: list, devices: list, training: bool, variants: Any
) -> CutPipe:
    """Returns a pipe's copy: cut again at the same places, with the stages' own tensors."""
    engine = _C.cut(source.engine, **arguments)
    for s, (state, device) in enumerate(zip(stages, devices)):
        used = {name for name, kind, *_ in engine.stage(s).state() if kind != CONSTANT}  # constants are each graph's own
        engine.stage(s).set_state([(name, tensor) for name, _, tensor, _ in state if name in used])
        if device is not None:
            engine.move_stage(s, device)
    return CutPipe(engine, source, loss, arguments, variants).train(training)


@checked
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
    wire: Wire | None = None,
    wire_exclude: Sequence[str] = (),
) -> CutPipe:
    """Cuts a model into stages.

    Args:
        module: a ``torch.nn.Module``, a `plumb.GraphModule`, an exported program, or the path of a ``.pt2`` file. It is
            left as it is; the stages share its tensors.
        mb_args, mb_kwargs: example inputs of one microbatch; a graph or file needs none (but a measured cut does).
        split_spec: names of modules and where to cut there. Without it, at the `pipe_split` marks in the forward.
        split_policy: a function that puts marks into the model's ``torch.fx`` graph, a policy object (`Balanced`,
            `split_into_equal_size`, `split_on_size_threshold`, `StagePolicy`), or "balanced" (measured: for one process, as
            ranks measure differently), "estimated", "equal_size".
        num_stages: for policies by name; else checked, if given.
        multi_use_param_spec: the treatment of a parameter that several stages use, for all or by full name. Default:
            the plan's, else REPLICATE.
        output_loss_value_spec: the outputs' structure with True for the loss and False elsewhere; "auto" for an output
            "loss". The pipe then has a backward.
        wire: ``("e4m3fn", "e5m2")``: formats of what crosses between stages, values and their gradients; ``"none"`` for
            either leaves it as it is. Both are rounded wherever the stages run, as a part of the model, and travel
            between processes as codes, one byte each. Integers and values without a gradient (masks) stay as they are;
            ``wire_report()`` says what travels how.
        wire_exclude: patterns of the names of values that travel as they are, as that report names them.
        move_cuts: whether a cut through memory that is written may move to where it is right (see ``notes``).

    Cuts before the first and after the last operator, and cuts next to each other, make no empty stages.

    Stages of a live module take other sizes than the example's, batch and length, in schedules and called one after the
    other; it is captured and cut again for each size. For that it has to live: keep it (``module.to("meta")`` lets go of
    its memory and not of the stages'). Those of a program follow its dynamic shapes. Raises `plumb.Error`.
    """
    if split_spec is not None and split_policy is not None:
        raise InvalidValue("Cannot specify both `split_spec` and `split_policy`", remedy="one of them")
    source, spec = make_source(module, mb_args, mb_kwargs, split_spec)
    loss = find_loss_spec(module, source, output_loss_value_spec)
    pipe = _cut(source, spec, split_policy, num_stages, multi_use_param_spec, loss, move_cuts, wire, wire_exclude)
    if num_stages is not None and pipe.num_stages != num_stages:
        raise InvalidValue(
            f"the cuts give {pipe.num_stages} stages instead of {num_stages}", remedy='split_policy="estimated", or other cuts'
        )
    return pipe
