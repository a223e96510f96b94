"""A plumb graph as a ``torch.fx.GraphModule`` on ``torch.ops``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from . import _C  # noqa: F401  (registers the operators)
from ._state import CONSTANT

# They measure and check when a compiled program runs, and nobody uses what they return.
for _effect in ("track_traced", "guard_equal", "guard_check", "guard_value", "guard_answer", "guard_size"):
    fx.node.has_side_effect(getattr(torch.ops.plumb, _effect).default)


def find_operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def to_graph(source: Any, graph: fx.Graph, attribute: Callable[[Any], fx.Node], env: dict | None = None) -> None:
    """Writes the nodes of a `plumb.Graph` into `graph`; `attribute` makes the node of a get_attr, unless `env`, from names
    of values to nodes, has it already. Every node knows its value's name there as ``meta["plumb"]``."""
    env = {} if env is None else env

    def resolve(arg: Any) -> Any:
        if isinstance(arg, tuple) and len(arg) == 2 and arg[0] == "value":
            return env[arg[1]]
        if isinstance(arg, list):
            return [resolve(a) for a in arg]
        return arg

    grad = True

    def set_grad(enabled: bool) -> None:
        nonlocal grad
        if grad != enabled:
            graph.call_function(torch._C._set_grad_enabled, (enabled,)).meta["plumb"] = ""
            grad = enabled

    def note(value: Any, node: fx.Node) -> None:
        env[value.name] = node
        node.meta["plumb"] = value.name

    for node in source.nodes:
        if node.op == "placeholder":
            value = node.results[0]
            if value.is_tensor:
                note(value, graph.placeholder(value.name))
            else:
                env[value.name] = None
        elif node.op == "get_attr":
            if node.results[0].name not in env:
                note(node.results[0], attribute(node))
        elif node.op == "call_function":
            set_grad(node.grad_enabled)
            args, kwargs = [], {}
            for (name, keyword), arg in zip(node.arg_names, node.args):
                if keyword:
                    kwargs[name] = resolve(arg)
                else:
                    args.append(resolve(arg))
            call = graph.call_function(find_operator(node.target), tuple(args), kwargs)
            call.meta["plumb"] = node.name if node.results else ""
            results = iter(node.results)
            layout = node.result_layout
            for i, count in enumerate(layout):
                part = call
                if len(layout) > 1:
                    part = graph.call_function(operator.getitem, (call, i))
                    part.meta["plumb"] = ""
                if count < 0:
                    note(next(results), part)
                else:
                    for k in range(count):
                        note(next(results), graph.call_function(operator.getitem, (part, k)))
        elif node.op == "output":
            set_grad(True)
            graph.output(tuple(resolve(a) for a in node.args))
        else:
            raise RuntimeError(f"{node} holds a nested graph, which torch.fx does not run")


def engine_to_fx(engine: Any, training: bool, lift_constants: bool = False) -> tuple[fx.GraphModule, list[str]]:
    """`lift_constants`: they go through ``lift_fresh``, so that a tracer with fake tensors takes them. The result takes the parameters and buffers that are named beside it, then the tensor inputs, and returns a flat
    tuple. They are inputs, not members, so that whoever traces the module sees them as the module's own."""
    root = nn.Module()
    constants = {name: tensor for name, kind, tensor, _ in engine.state() if kind == CONSTANT}
    graph = fx.Graph()
    env: dict[str, fx.Node | None] = {}
    names: list[str] = []
    taken: set[str] = set()
    for node in engine.graph.nodes:
        if node.op == "get_attr" and node.target not in constants:
            # Modules may be called "block-0", and a.b_c is not a_b.c.
            argument = "p_" + re.sub(r"\W", "_", node.target)
            while argument in taken:
                argument += "_"
            taken.add(argument)
            env[node.results[0].name] = graph.placeholder(argument)
            names.append(node.target)

    def constant(node: Any) -> fx.Node:
        attribute = node.target.replace(".", "_")
        root.register_buffer(attribute, constants[node.target])
        made = graph.get_attr(attribute)
        return graph.call_function(torch.ops.aten.lift_fresh.default, (made,)) if lift_constants else made

    to_graph(engine.graph, graph, constant, env)
    gm = fx.GraphModule(root, graph)
    gm.training = training
    return gm, names


def to_fx(module: nn.Module) -> fx.GraphModule:
    """Of a :class:`plumb.GraphModule`; the names are in ``attributes``."""
    gm, gm.attributes = engine_to_fx(module._engine, module.training)
    return gm
