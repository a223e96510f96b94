"""Sources of a cut (a live module, a captured one, a ``.pt2`` file, an exported program: all become a `Source`), and its
options: the places, by a policy; which output is the loss; how shared parameters are kept."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Union

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._arguments import checked
from .._capture.forward import capture_engine, keyword_order, positional_names
from .._capture.guards import Guards
from .._errors import Error, ErrorKind
from .._exported import load_pt2
from .._fx import attribute_targets, graph_module, to_graph
from .._graph_module import GraphModule
from .._state import BUFFER, CONSTANT, PARAMETER, in_modes, put_state, state_of, sync_state
from .._transformed import forward_of
from .._trees import children, flatten
from .._unit_scaled import is_marked
from ._marks import TrivialLossWrapper, annotate_split_points, check_split_spec, is_mark, unmarked_forward
from ._utils import InvalidType, InvalidValue

logger = logging.getLogger("plumb.pipelining")

_EXPORT = "export the program with dynamic shapes (torch.export.export(..., dynamic_shapes=...)), or cut the live module"
_CUT_THE_MODULE = "cut the module itself instead of its graph, which holds the sizes it was captured with"


@dataclass
class Source:
    """A graph to be cut, with what Python knows of the model's call."""

    module: GraphModule  # the whole
    arguments: list[tuple[str, int]]  # per flat input: the argument it belongs to, and which leaf of it
    parameters: list[str]  # names of the forward's positional parameters
    example: list | None = None
    again: Any = None  # function that captures a live module for other inputs; it returns None once the module is gone
    other_sizes: str | None = None  # remedy for other sizes, if the source holds one graph alone
    unit_scaled: bool = False  # state dicts of the whole bear the mark of unit-scaled weights
    model: Callable[[], nn.Module | None] = lambda: None  # the live module as long as it exists
    guards: Guards | None = None  # guards on what its forward read
    kinds: dict[str, tuple[torch.dtype, torch.device]] = field(default_factory=dict)  # tensors' dtypes and devices when cut

    @property
    def engine(self) -> Any:
        return self.module._engine

    @property
    def structures(self) -> dict[str, Any]:
        """Tree specs of the arguments, by their names."""
        return _structures(self.module._in_spec, self.parameters)

    def call(self) -> dict[str, Any]:
        """Returns how the model was called when it was cut, as fields of a `PipeInfo`."""
        names = list(self.structures)
        by_position = names[: len(children(children(self.module._in_spec)[0]))]
        return {
            "input_names": list(self.arguments),
            "positional": self.parameters + by_position[len(self.parameters) :] or names,
            "structures": self.structures,
            "plain_inputs": self.module._plain_inputs,
            "takes_tensor": self.module._takes_tensor,
            "layouts": (self.module._input_layouts[0], dict(self.module._input_layouts[1])),
        }

    def flatten(self, args: tuple, kwargs: dict) -> list:
        """Flat inputs of a call that may pass by position what the example passed by name, and the other way round; None
        for what is no tensor and not the graph's to take."""
        if pytree.tree_structure((args, kwargs)) != self.module._in_spec:
            args, kwargs = self._as_captured(args, kwargs)
        leaves = self.module._leaves(args, kwargs)
        self.module._check_inputs(leaves)
        return [x if isinstance(x, Tensor) or self.module._plain_inputs is None else None for x in leaves]

    def _as_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        positional, named = children(self.module._in_spec)
        num_args, keywords = len(children(positional)), list(named.context or [])
        names = [*self.parameters[:num_args], *keywords]
        if len(self.parameters) < max(num_args, len(args)) or not self.module._keeps_order(kwargs):
            return args, kwargs
        known = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in dict.fromkeys([*self.parameters, *names])]
        try:
            given = inspect.Signature(known).bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidType(f"the model's call: {error}", kind=ErrorKind.UnknownName, remedy=", ".join(names)) from None
        if set(names) != set(given):
            return args, kwargs
        return tuple(given[n] for n in names[:num_args]), {n: given[n] for n in keywords}

    def inputs(self, flat: list) -> tuple[tuple, dict]:
        """Returns the arguments of a call with these flat inputs."""
        leaves = [value if known is None else known for value, known in zip(flat, self.module._plain_inputs)]
        return pytree.tree_unflatten(leaves, self.module._in_spec)

    def modes(self) -> tuple[bool, ...] | None:
        """Returns the training modes of a live module's parts; None if there is none."""
        model = self.model()
        return None if model is None else tuple([sub.training for sub in model.modules()])


def _structures(in_spec: Any, parameters: list[str]) -> dict[str, Any]:
    """Returns the tree spec of each argument, by its name."""
    args, kwargs = children(in_spec)
    positional = [parameters[i] if i < len(parameters) else f"arg{i}" for i in range(len(children(args)))]
    named = [str(name) for name in kwargs.context or []]
    return dict(zip([*positional, *named], [*children(args), *children(kwargs)]))


def _argument_names(in_spec: Any, parameters: list[str]) -> list[tuple[str, int]]:
    return [(name, leaf) for name, part in _structures(in_spec, parameters).items() for leaf in range(part.num_leaves)]


class _AsCut:
    """A live model as it was when it was cut, for captures later: modes, and the dtypes and devices of its tensors."""

    def __init__(self, module: nn.Module, state: list, first: _AsCut | None = None):
        """`first`: of the cut that this one repeats. It may see stand-ins for the model's parameters."""
        if first is None:
            self.ids = {name: (id(p), p.device) for name, p in module.named_parameters()}
            self.parameters = Guards()
            self.parameters.add_parameters(list(module.named_modules()))
            self.parameters.end_with(module)
        else:
            self.ids, self.parameters = first.ids, first.parameters
        self._modes = [sub.training for sub in module.modules()]
        self.kinds = {name: (tensor.dtype, tensor.device) for name, _, tensor, _ in state}

    def run(
        self,
        module: nn.Module,
        capture: Callable[[], Source],
        modes: Sequence[bool] | None = None,
        dtypes: Mapping[torch.dtype, torch.dtype] = {},
    ) -> Source:
        """`modes`, `dtypes`: other ones than it was cut with."""
        modules, modes = list(module.modules()), self._modes if modes is None else modes
        if len(modules) != len(modes):
            raise Error(
                f"the model has {len(modules)} modules, and had {len(modes)} when it was cut",
                kind=ErrorKind.InvalidState,
                remedy="cut the model again after changing it",
            )
        self._refuse_other_parameters(module)
        # A stage that was moved has taken its part of the model along; a capture asks for no values of parameters.
        stand_ins: dict[str, Tensor] = {}
        made: dict[int, Tensor] = {}
        for name, _, tensor, _ in state_of(module):
            dtype, device = self.kinds.get(name, (tensor.dtype, tensor.device))
            kind = (dtypes.get(dtype, dtype), device)
            if kind != (tensor.dtype, tensor.device):
                made[id(tensor)] = made[id(tensor)] if id(tensor) in made else _stand_in(tensor, *kind)
                stand_ins[f"model.{name}"] = made[id(tensor)]
        around = nn.Module()
        around.model, around.forward = module, capture
        with in_modes(modules, modes):
            return torch.func.functional_call(around, stand_ins, ())

    def _refuse_other_parameters(self, module: nn.Module) -> None:
        """The stages hold those of the cut: a model with others would be captured with names that are not of its values."""
        other = None if self.parameters.hold() else self.parameters.broken
        for name, p in module.named_parameters():
            known, device = self.ids.get(name, (id(p), p.device))
            if known != id(p) and device == p.device:
                other = name
        if other is not None:
            raise Error(
                f"'{other}' is not the parameter that it was when the model was cut, which the stages hold",
                kind=ErrorKind.InvalidState,
                remedy="cut the model again after changing it",
            )


def _stand_in(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
        return tensor.to(dtype=dtype, device=device)
    # Memory that is never written is never really there.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty.zero_()


def from_module(module: nn.Module, args: tuple, kwargs: dict, spec: Any = None, first: _AsCut | None = None) -> Source:
    """Captures one forward, with marks around the modules of `spec`. `first`: of the cut that this one repeats."""
    logger.info("Tracing model ...")
    parameters = positional_names(unmarked_forward(module))
    with annotate_split_points(module, spec) if spec else contextlib.nullcontext() as marks:
        captured = capture_engine(module, args, kwargs)
        if marks is not None:
            marks.check_called()
    leaves = flatten((args, kwargs))[0]
    guards = captured.guards(parts=True)  # without the marks
    whole = captured.as_module(leaves, module.training, guards)
    whole._keyword_order = keyword_order(unmarked_forward(module), kwargs)
    whole._made_how, whole._make_again = "the model was cut", "cut it with inputs like these"
    alive = guards.end_with(module)
    as_cut = _AsCut(module, captured.engine.state(), first)
    guards.include(as_cut.parameters)

    def again(args: tuple, kwargs: dict, **other: Any) -> Source | None:
        model = alive()
        if model is None:
            return None
        return as_cut.run(model, lambda: from_module(model, args, kwargs, spec, first or as_cut), **other)

    example = [x if isinstance(x, Tensor) else None for x in leaves]
    return Source(
        whole, _argument_names(captured.in_spec, parameters), parameters, example, again, unit_scaled=is_marked(module),
        model=alive, guards=guards, kinds=as_cut.kinds,
    )  # fmt: skip


def from_graph_module(module: GraphModule, args: tuple, kwargs: dict) -> Source:
    """Returns a captured module, or one from a file, whose graph takes and checks every input itself."""
    sync_state(module._engine, module._slots)
    program = module._program
    parameters = list(program.argument_names) if program is not None else []
    example = pytree.tree_leaves((args, kwargs)) or (_sample(program.sample_inputs) if program is not None else None)
    other_sizes = _EXPORT if module._plain_inputs is None else _CUT_THE_MODULE
    arguments = _argument_names(module._in_spec, parameters)
    return Source(module, arguments, parameters, example, None, other_sizes, is_marked(module))


def from_pt2(path: str | os.PathLike, args: tuple, kwargs: dict) -> Source:
    with contextlib.suppress(ImportError):
        import torch.distributed.pipelining  # noqa: F401  (torch's marks are an operator that only this registers)
    return from_graph_module(load_pt2(path), args, kwargs)


def _sample(data: bytes) -> list | None:
    if not data:
        return None
    try:
        return pytree.tree_leaves(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:  # classes that may not be unpickled: cut without an example
        return None


def from_exported(program: torch.export.ExportedProgram, args: tuple, kwargs: dict) -> Source:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.pt2")
        torch.export.save(program, path)
        return from_pt2(path, args, kwargs)


def make_source(module: Any, args: Any, kwargs: dict | None, spec: Any = None) -> tuple[Source, Any]:
    """Returns the source, and the part of `spec` that is still to be cut at (by module names in the graph)."""
    if isinstance(args, Mapping) or args is None:
        raise InvalidType(
            f"mb_args is a {type(args).__name__}, not a tuple of inputs by position: mb_args=(), and names in mb_kwargs"
        )
    if not isinstance(kwargs, (Mapping, type(None))) or not all(isinstance(name, str) for name in kwargs or ()):
        raise InvalidType('mb_kwargs is no dict of inputs by their names: mb_kwargs={"mask": mask}')
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    kwargs = dict(kwargs or {})
    if spec is not None:
        check_split_spec(None, spec)
    if isinstance(module, GraphModule) and module.runs_its_graph:
        return from_graph_module(module, args, kwargs), spec
    if isinstance(module, nn.Module):
        # A part that runs a graph of its own has names for its modules there, and does not call them.
        if spec and any(forward_of(sub) is not None for sub in module.modules()):
            check_split_spec(module, spec)
            return from_module(module, args, kwargs), spec
        return from_module(module, args, kwargs, spec), None
    if isinstance(module, (str, os.PathLike)):
        return from_pt2(module, args, kwargs), spec
    if isinstance(module, torch.export.ExportedProgram):
        return from_exported(module, args, kwargs), spec
    raise InvalidType(
        f"a {type(module).__name__} cannot be cut: give a torch.nn.Module, a plumb.GraphModule, a torch.export program or "
        "the path of a .pt2 file"
    )


# --- where to cut it ---
class SplitPolicy(ABC):
    """Says where to cut a `Source`, as arguments of ``_C.cut``."""

    @abstractmethod
    def cuts(self, source: Source) -> dict[str, Any]: ...


@checked
@dataclass
class Balanced(SplitPolicy):
    """Cuts so that the slowest stage is as fast as can be, by dynamic programming over all places.

    The cost of every operator is measured on the example inputs (``measure``), or else estimated from shapes and
    FLOPs. Each stage pays for what crosses its boundaries: `seconds_per_message` and `bytes_per_second`, forward and
    backward. `memory_limits`: bytes a stage may need, one a stage or one for all: `bytes_per_parameter_byte` (4: a
    gradient and AdamW's state beside the parameter) and the activations of the microbatches that 1F1B holds there.
    After a cut, `rows` has a dict a stage, and `report` is a table.
    """

    num_stages: int
    measure: bool = True
    repeats: int = 5
    memory_limits: int | Sequence[int] | None = None
    seconds_per_message: float = 0.0
    bytes_per_second: float = 1e10
    bytes_per_parameter_byte: float = 4.0
    rows: list[dict] = field(default_factory=list, init=False, repr=False)
    report: str = field(default="", init=False, repr=False)

    def cuts(self, source: Source) -> dict[str, Any]:
        limits = self.memory_limits
        limits = [] if limits is None else [limits] if isinstance(limits, int) else list(limits)
        before, self.rows, self.report = _C.balance(
            source.engine, self.num_stages, inputs=source.example, repeats=self.repeats if self.measure else 0,
            seconds_per_message=self.seconds_per_message, bytes_per_second=self.bytes_per_second,
            memory_limits=limits, bytes_per_parameter_byte=self.bytes_per_parameter_byte,
        )  # fmt: skip
        return {"before_ops": before} if before else {"before_values": []}


@checked
@dataclass
class split_into_equal_size(SplitPolicy):
    """So many stages of about the same size of parameters and buffers."""

    nstages: int = 1

    def cuts(self, source: Source) -> dict[str, Any]:
        return {"before_values": _C.cuts_of_equal_size(source.engine, self.nstages)}


@checked
@dataclass
class split_on_size_threshold(SplitPolicy):
    """Cuts into stages of at most this many bytes of parameters and buffers; one operator's own may be more."""

    threshold: int

    def cuts(self, source: Source) -> dict[str, Any]:
        return {"before_values": _C.cuts_at_size(source.engine, self.threshold)}


@dataclass
class StagePolicy(SplitPolicy):
    """The stage of every operator, by a function of its node (`plumb.Graph`'s). Values may only go forward."""

    stage_of: Callable[[Any], int]

    def cuts(self, source: Source) -> dict[str, Any]:
        return {"policy": self.stage_of}


@dataclass
class MarkingPolicy(SplitPolicy):
    """A function that puts marks (`pipe_split`, or ``torch.ops.pippy._pipe_split``) into the model's ``torch.fx`` graph,
    in place or in the module that it returns. It may add nothing else."""

    mark: Callable[[fx.GraphModule], fx.GraphModule | None]

    def cuts(self, source: Source) -> dict[str, Any]:
        traced = fx_view(source)
        marked = self.mark(traced)
        marked = traced if marked is None else marked
        if not isinstance(marked, fx.GraphModule):
            raise InvalidType(f"the split policy returned a {type(marked).__name__} instead of a torch.fx.GraphModule")
        values, pending = [], False
        for node in marked.graph.nodes:
            if node.op == "call_function" and is_mark(node.target):
                pending = True
            elif node.op in ("call_function", "call_module", "call_method") and "plumb" not in node.meta:
                raise Error(f"the split policy put '{node.format_node()}' into the graph: it may put marks there only", kind=ErrorKind.Partition)
            elif pending and node.meta.get("plumb") and node.op == "call_function":
                values.append(node.meta["plumb"])
                pending = False
        return {"before_values": values}


def fx_view(source: Source) -> fx.GraphModule:
    """The graph as policies for torch's pipelining know it: parameters are members, nodes have ``meta["val"]``."""
    root, graph = torch.nn.Module(), fx.Graph()
    state = source.engine.state()
    targets = attribute_targets(name for name, *_ in state)
    put_state(root, [(targets[name], BUFFER if kind == CONSTANT else kind, *rest) for name, kind, *rest in state])
    to_graph(source.engine.graph, graph, lambda node: graph.get_attr(targets[node.target]))
    metas = {v.name: v.meta for node in source.engine.graph.nodes for v in node.results}
    for node in graph.nodes:
        if (meta := metas.get(node.meta.get("plumb"))) is not None:
            node.meta["val"] = torch.empty_strided(meta["shape"], meta["stride"], dtype=meta["dtype"], device="meta")
    return graph_module(root, graph)


def make_policy(policy: Any, num_stages: int | None) -> SplitPolicy:
    """From a policy, a function, or a name: "balanced" (measured), "estimated", "equal_size"."""
    if isinstance(policy, SplitPolicy):
        return policy
    if isinstance(policy, str):
        names = {"balanced": Balanced, "estimated": lambda n: Balanced(n, measure=False), "equal_size": split_into_equal_size}
        if policy not in names:
            raise InvalidValue(
                f"there is no split policy '{policy}'", kind=ErrorKind.UnknownName, remedy=f"one of {', '.join(names)}"
            )
        if num_stages is None:
            raise InvalidValue(f"split_policy='{policy}' needs num_stages: how many stages to cut into")
        return names[policy](num_stages)
    if callable(policy):
        return MarkingPolicy(policy)
    raise InvalidType(f"a {type(policy).__name__} is no split policy: give a function, a policy object or its name")


class MultiUseParameterConfig(Enum):
    """How a parameter of several stages is kept: the first stage owns it and sends it with every microbatch,
    or each stage has a copy, whose gradients are summed before the optimizer's step."""

    TRANSMIT = 1
    REPLICATE = 2


MultiUseParamSpec = Union[MultiUseParameterConfig, dict[str, MultiUseParameterConfig]]


def find_loss_spec(module: Any, source: Source, spec: Any) -> Any:
    if spec is None:
        return None
    if isinstance(module, TrivialLossWrapper):
        return TrivialLossWrapper.loss_spec
    if spec != "auto":
        return spec
    keys = _keys(source.module._out_spec)
    if "loss" not in keys:
        raise InvalidValue(
            "output_loss_value_spec='auto' finds no loss: the model returns no dict with a 'loss'",
            remedy="the outputs' structure with True for the loss and False elsewhere",
        )
    return {key: key == "loss" for key in keys}


def _keys(spec: Any) -> list:
    """Keys of a dict, or of a class like transformers' outputs that is flattened as one."""
    context = spec.context
    for keys in (context, *(context if isinstance(context, tuple) else ())):
        if isinstance(keys, list) and len(keys) == spec.num_children and all(isinstance(k, str) for k in keys):
            return keys
    return []


def plain_loss_spec(loss: Any, spec: Any) -> Any:
    """Dicts as sequences where the model returns a class that only looks like a dict."""
    parts = children(spec)
    if isinstance(loss, dict) and spec.type not in (dict, OrderedDict) and (keys := _keys(spec)):
        if set(loss) != set(keys):
            raise InvalidValue(f"the loss spec has the keys {sorted(loss)}, the outputs {sorted(keys)}")
        loss = [loss[k] for k in keys]
    if isinstance(loss, dict) and set(loss) == set(spec.context or []):
        return {k: plain_loss_spec(loss[k], c) for k, c in zip(spec.context, parts)}
    if isinstance(loss, (tuple, list)) and len(loss) == len(parts):
        return type(loss)(plain_loss_spec(part, child) for part, child in zip(loss, parts))
    return loss


def refuse_no_parameters(names: Iterable[Any], source: Source, where: str) -> None:
    known = {name for name, kind, *_ in source.engine.state() if kind == PARAMETER}
    for name in names:
        if name not in known:
            message = f"the model has no parameter {name!r}"
            raise Error(message, kind=ErrorKind.UnknownName, where=where, remedy="a name of its named_parameters()")


def multi_use_arguments(spec: Any, source: Source) -> dict[str, Any]:
    def transmit(value: Any, message: str) -> bool:
        name = getattr(value, "name", None)
        if name not in ("TRANSMIT", "REPLICATE"):
            raise InvalidValue(message, remedy="MultiUseParameterConfig.TRANSMIT or MultiUseParameterConfig.REPLICATE")
        return name == "TRANSMIT"

    if spec is None:
        return {}
    if isinstance(spec, Mapping):
        refuse_no_parameters(spec, source, "multi_use_param_spec")
        unknown = "Unknown multi-use config value {} specified for {}"
        by_name = {name: transmit(v, unknown.format(v, name)) for name, v in spec.items()}
        return {"transmit": False, "transmit_by_name": by_name}
    every = transmit(spec, f"multi_use_param_spec must be MultiUseParamSpec enum or dict, not {spec!r}")
    return {"transmit": every, "transmit_by_name": {}}
