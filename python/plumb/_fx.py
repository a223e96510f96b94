"""A plumb graph as a ``torch.fx.GraphModule`` on ``torch.ops``."""

from __future__ import annotations

import functools
import keyword
import linecache
import operator
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from ._errors import Error
from ._state import constants_of

# They measure and check when a compiled program runs, and nobody uses what they return.
for _effect in ("track_traced", "guard_equal", "guard_check", "guard_value", "guard_value_read", "guard_size"):
    fx.node.has_side_effect(getattr(torch.ops.plumb, _effect).default)


# torch.fx writes names into source that it runs, and escapes none of them. Names may come from a file.
_OUTSIDE_OF_WORDS = re.compile(r"[^0-9A-Za-z_]")
_OUTSIDE_OF_PATHS = re.compile(r"[^0-9A-Za-z_.@+ -]")


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """Returns an input of a graph under this name, or the nearest one that a Python argument may have there."""
    word = _OUTSIDE_OF_WORDS.sub("_", name)
    node = graph.placeholder(f"x_{word}" if word in ("", "self") else word)
    node.target = node.name  # torch.fx has made it the one of a free variable
    return node


def path(name: str) -> str:
    """Returns a dotted name as torch.fx may write it between quotes."""
    return _OUTSIDE_OF_PATHS.sub("_", name)


@functools.cache
def _taken() -> frozenset[str]:
    return frozenset(dir(graph_module(nn.Module(), fx.Graph())))


def attribute_targets(names: Iterable[str]) -> dict[str, str]:
    """By name of a tensor, the one that it may have in a `torch.fx.GraphModule`: its own wherever that can be."""
    found = dict.fromkeys(names)
    for i, name in enumerate(found):
        parts = name.split(".")
        target = name
        if path(name) != name or parts[0] in _taken() or any(map(keyword.iskeyword, parts)):
            target = f"p_{i}"
            while target in found:
                target += "_"
        found[name] = target
    return found


def _forget(key: str) -> None:
    fx.graph_module._loader.eval_cache.pop(key, None)
    linecache.cache.pop(key, None)


def graph_module(root: nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> fx.GraphModule:
    """Returns a `torch.fx.GraphModule` whose source, which torch would keep for ever, goes when it goes."""
    made = fx.GraphModule(root, graph, class_name=class_name)
    weakref.finalize(made, _forget, type(made).forward.__code__.co_filename)
    return made


def find_operator(target: str) -> Any:
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def with_values(arg: Any, value_of: Callable[[str], Any]) -> Any:
    """Returns an argument of a `plumb.Graph` node with `value_of(name)` in the place of each value."""
    if isinstance(arg, tuple) and len(arg) == 2 and arg[0] == "value":
        return value_of(arg[1])
    return [with_values(a, value_of) for a in arg] if isinstance(arg, list) else arg


def to_graph(source: Any, graph: fx.Graph, attribute: Callable[[Any], fx.Node], env: dict | None = None) -> None:
    """Writes the nodes of a `plumb.Graph` into `graph`; `attribute` makes the node of a get_attr, unless `env`, from names
    of values to nodes, has it already. Every node knows its value's name there as ``meta["plumb"]``."""
    env = {} if env is None else env
    resolve = functools.partial(with_values, value_of=env.__getitem__)
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
                note(value, placeholder(graph, value.name))
            else:
                env[value.name] = None
        elif node.op == "get_attr":
            if node.results[0].name not in env:
                note(node.results[0], attribute(node))
        elif node.target == "plumb::guard_requires_grad":
            continue  # a graph that is taken so is guarded by its owner, who asks below autograd
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
            raise Error(f"{node} holds a nested graph, which torch.fx does not run")


def engine_to_fx(engine: Any, training: bool, lift_constants: bool = False) -> tuple[fx.GraphModule, list[str]]:
    """Makes a torch.fx graph of an engine. `lift_constants`: they go through ``lift_fresh``, so that a tracer with fake
    tensors takes them. The result takes the parameters and buffers that are named beside it, then the tensor inputs,
    and returns a flat tuple. They are inputs, not members, so that a tracer of the module sees them as the module's
    own."""
    root = nn.Module()
    constants = constants_of(engine)
    graph = fx.Graph()
    env: dict[str, fx.Node | None] = {}
    names: list[str] = []
    for node in engine.graph.nodes:
        if node.op == "get_attr" and node.target not in constants:
            env[node.results[0].name] = placeholder(graph, f"p_{node.target}")
            names.append(node.target)

    def constant(node: Any) -> fx.Node:
        attribute = f"c_{len(root._buffers)}"
        root.register_buffer(attribute, constants[node.target])
        made = graph.get_attr(attribute)
        return graph.call_function(torch.ops.aten.lift_fresh.default, (made,)) if lift_constants else made

    to_graph(engine.graph, graph, constant, env)
    gm = graph_module(root, graph)
    gm.training = training
    return gm, names


def to_fx(module: nn.Module) -> fx.GraphModule:
    """Makes the torch.fx graph of a :class:`plumb.GraphModule`; the names are in ``attributes``."""
    gm, gm.attributes = engine_to_fx(module._engine, module.training)
    return gm
