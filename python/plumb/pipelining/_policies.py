"""What a cut is told: the places, by a policy; which output is the loss; what becomes of shared parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Union

import torch
from torch import fx

from .. import _C
from .._errors import Error, ErrorKind
from .._fx import attribute_targets, graph_module, to_graph
from .._state import BUFFER, CONSTANT, put_state
from ._errors import InvalidType, InvalidValue
from ._marks import TrivialLossWrapper, is_mark
from ._sources import Source


class SplitPolicy(ABC):
    """Says where to cut a `Source`, as arguments of ``_C.cut``."""

    @abstractmethod
    def cuts(self, source: Source) -> dict[str, Any]: ...


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


@dataclass
class split_into_equal_size(SplitPolicy):
    """So many stages of about the same size of parameters and buffers."""

    nstages: int = 1

    def cuts(self, source: Source) -> dict[str, Any]:
        return {"before_values": _C.cuts_of_equal_size(source.engine, self.nstages)}


@dataclass
class split_on_size_threshold(SplitPolicy):
    """Stages of at most so many bytes of parameters and buffers; one operator's own may be more."""

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
    """What becomes of a parameter that several stages use: the first stage owns it and sends it with every microbatch,
    or each stage has a copy, whose gradients are summed before the optimiser's step."""

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
    keys = _keys(source.out_spec)
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
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    if isinstance(loss, dict) and spec.type not in (dict, OrderedDict) and (keys := _keys(spec)):
        if set(loss) != set(keys):
            raise InvalidValue(f"the loss spec has the keys {sorted(loss)}, the outputs {sorted(keys)}")
        loss = [loss[k] for k in keys]
        return [plain_loss_spec(part, child) for part, child in zip(loss, children)]
    if isinstance(loss, dict) and set(loss) == set(spec.context or []):
        return {k: plain_loss_spec(loss[k], c) for k, c in zip(spec.context, children)}
    if isinstance(loss, (tuple, list)) and len(loss) == len(children):
        return type(loss)(plain_loss_spec(part, child) for part, child in zip(loss, children))
    return loss


def multi_use_arguments(spec: Any) -> dict[str, Any]:
    def transmit(value: Any, message: str) -> bool:
        name = getattr(value, "name", None)
        if name not in ("TRANSMIT", "REPLICATE"):
            raise InvalidValue(message, remedy="MultiUseParameterConfig.TRANSMIT or MultiUseParameterConfig.REPLICATE")
        return name == "TRANSMIT"

    if spec is None:
        return {}
    if isinstance(spec, Mapping):
        unknown = "Unknown multi-use config value {} specified for {}"
        return {"transmit_by_name": {name: transmit(v, unknown.format(v, name)) for name, v in spec.items()}}
    return {"transmit": transmit(spec, f"multi_use_param_spec must be MultiUseParamSpec enum or dict, not {spec!r}")}
