"""Private functions of torch's ``_IR`` on plain ``torch.fx`` graphs of stages, which a `Pipe` does without."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from plumb.pipelining._marks import TrivialLossWrapper, pipe_split
from plumb.pipelining._utils import InvalidSchedule, InvalidValue
from torch import fx


# --- the loss among the outputs ---
def _find_loss_from_output_and_spec(output_val: Any, spec_val: Any) -> fx.Node | None:
    """Returns the node of the outputs where the spec, which has their structure, has True. None for False."""
    if isinstance(spec_val, bool):
        if spec_val and not isinstance(output_val, fx.Node):
            raise InvalidValue(f"Loss spec must specify a dynamic value but got {output_val}")
        return output_val if spec_val else None
    if isinstance(spec_val, dict):
        fits, what = isinstance(output_val, dict), "keys"
        alike = fits and set(output_val) == set(spec_val)
        pairs = [(output_val[key], spec_val[key]) for key in spec_val] if alike else []
    elif isinstance(spec_val, (tuple, list)):
        fits, what = isinstance(output_val, (tuple, list)), "length"
        alike = fits and len(output_val) == len(spec_val)
        pairs = list(zip(output_val, spec_val)) if alike else []
    else:
        raise InvalidValue(f"Unsupported type {type(spec_val)} in loss specification")
    if not alike:
        raise InvalidValue(
            f"Output value {output_val} must match {what if fits else 'type'} of loss specification {spec_val}"
        )
    for output, spec in pairs:
        if (loss := _find_loss_from_output_and_spec(output, spec)) is not None:
            return loss
    raise InvalidValue(f"Did not find loss value in specification {spec_val}")


def _find_loss_output(
    mod: torch.nn.Module, g: fx.Graph, output_loss_value_spec: Any
) -> tuple[fx.Node | None, fx.Node, Any]:
    """The loss, the graph's output node, and the spec: given, known of the wrapper, or of a dict with a "loss"."""
    outputs = [node for node in g.nodes if node.op == "output"]
    if len(outputs) != 1:
        raise InvalidSchedule(f"a graph has one output, and this one {len(outputs)}")
    value = outputs[0].args[0]
    if isinstance(mod, TrivialLossWrapper):
        return value, outputs[0], TrivialLossWrapper.loss_spec
    if output_loss_value_spec is not None:
        return _find_loss_from_output_and_spec(value, output_loss_value_spec), outputs[0], output_loss_value_spec
    if isinstance(value, dict) and "loss" in value:
        return value["loss"], outputs[0], {key: key == "loss" for key in value}
    return None, outputs[0], None


# --- a graph without its graph ---
class _NodeReference:
    """Stands for a node by its name."""

    def __init__(self, name: str):
        self.name = name


class _LinearNodeList:
    """The nodes of a graph as data: `to_graph` makes them into one again."""

    def __init__(self, node_list: Iterable[fx.Node]):
        def apart(value: Any) -> Any:
            return fx.node.map_arg(value, lambda node: _NodeReference(node.name))

        self.serialize_node_list = [
            {
                "op": node.op,
                "target": node.target,
                "args": apart(node.args),
                "kwargs": apart(node.kwargs),
                "name": node.name,
                "type_expr": node.type,
                "meta": copy.copy(node.meta),
            }
            for node in node_list
        ]

    def to_graph(self) -> fx.Graph:
        graph, made = fx.Graph(), {}

        def together(value: Any) -> Any:
            return fx.node.map_aggregate(value, lambda v: made[v.name] if isinstance(v, _NodeReference) else v)

        for entry in self.serialize_node_list:
            how = {**entry, "args": together(entry["args"]), "kwargs": together(entry["kwargs"])}
            meta = how.pop("meta")
            made[entry["name"]] = node = graph.create_node(**how)
            node.meta = copy.copy(meta)
        return graph


class _Body(torch.nn.Module):
    def __init__(self, body: dict):
        super().__init__()
        self.__dict__.update(body)


def _direct_serialization_deserialize(body: dict, nodes: _LinearNodeList) -> fx.GraphModule:
    """Rebuilds a graph module from the result of `_direct_serialization_reduce`."""
    return fx.GraphModule(_Body(body), nodes.to_graph())


def _direct_serialization_reduce(self: fx.GraphModule) -> tuple:
    """``__reduce__`` for graph modules that are sent as they are, without code."""
    body = {name: value for name, value in self.__dict__.items() if name != "_graph"}
    return _direct_serialization_deserialize, (body, _LinearNodeList(self.graph.nodes))


# --- forwards with a mark ---
def _split_before_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    pipe_split()
    return self._orig_forward(*args, **kwargs)


def _split_after_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return self._orig_forward(*args, **kwargs)
    finally:
        pipe_split()
