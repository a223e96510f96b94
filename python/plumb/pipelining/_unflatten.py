"""A flat graph of torch.export with the modules it was made from as modules again."""

from __future__ import annotations

import operator

import torch
from torch import fx

from .._fx import path


def _path(node: fx.Node) -> tuple[str, ...]:
    """The modules in which a node was called, from the outermost in."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [value[0] if isinstance(value, tuple) else value for value in stack.values()]
    return tuple(path(name) for name in names if name)


def _runs(nodes: list[fx.Node], depth: int) -> list[tuple[str | None, list[fx.Node]]]:
    """Neighbouring nodes of one module together, others alone."""
    runs: list[tuple[str | None, list[fx.Node]]] = []
    for node in nodes:
        path = _path(node) if node.op in ("call_function", "call_method") else ()
        name = path[depth] if len(path) > depth else None
        if name is not None and runs and runs[-1][0] == name:
            runs[-1][1].append(node)
        else:
            runs.append((name, [node]))
    return runs


def _add(root: torch.nn.Module, name: str, module: torch.nn.Module) -> str:
    """Puts a module under its name, or under the next free one if it was called before."""
    *parents, leaf = name.split(".")
    owner = root
    for part in parents:
        if part not in owner._modules:
            owner.add_module(part, torch.nn.Module())
        owner = owner._modules[part]
    free, count = leaf, 0
    while isinstance(owner._modules.get(free), fx.GraphModule):
        count += 1
        free = f"{leaf}@{count}"
    for child, kept in owner._modules[free].named_children() if free in owner._modules else ():
        module.add_module(child, kept)
    owner.add_module(free, module)
    return ".".join([*parents, free])


def _write(
    nodes: list[fx.Node], graph: fx.Graph, env: dict[fx.Node, fx.Node], root: torch.nn.Module, prefix: str, depth: int
) -> None:
    for name, run in _runs(nodes, depth):
        if name is None:
            for node in run:
                env[node] = graph.node_copy(node, env.__getitem__)
            continue
        inside = set(run)
        inputs = list(dict.fromkeys(i for node in run for i in node.all_input_nodes if i not in inside))
        outputs = [node for node in run if any(user not in inside for user in node.users)]
        inner, inner_env = fx.Graph(), {}
        for value in inputs:
            inner_env[value] = inner.placeholder(value.name)
            inner_env[value].meta = dict(value.meta)
        owner = torch.nn.Module()
        _write(run, inner, inner_env, owner, name, depth + 1)
        results = tuple(inner_env[node] for node in outputs)
        inner.output(results[0] if len(results) == 1 else results)
        local = name[len(prefix) + 1 :] if prefix and name.startswith(prefix + ".") else name
        called = _add(root, local, fx.GraphModule(owner, inner))
        call = graph.call_module(called, tuple(env[value] for value in inputs))
        if len(outputs) == 1:
            env[outputs[0]] = call
        else:
            for i, node in enumerate(outputs):
                env[node] = graph.call_function(operator.getitem, (call, i))



def _keep(source: torch.nn.Module, target: torch.nn.Module, name: str) -> None:
    """Takes what a graph names over from its module, unless a module made here has that name."""
    *path, leaf = name.split(".")
    for part in path:
        source = getattr(source, part)
        if part not in target._modules:
            target.add_module(part, torch.nn.Module())
        target = target._modules[part]
    if not hasattr(target, leaf):
        setattr(target, leaf, getattr(source, leaf))


def _outline_submodules(orig_graph: fx.Graph) -> fx.GraphModule:
    """A module whose graph calls a module for every module call in `orig_graph` (by ``meta["nn_module_stack"]``), and so
    on inside of them. Parameters stay inputs or attributes where they are."""
    root, graph = torch.nn.Module(), fx.Graph()
    nodes = list(orig_graph.nodes)
    outside = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    env = {node: graph.node_copy(node) for node in outside}
    _write([node for node in nodes if node not in env], graph, env, root, "", 0)
    owner = orig_graph.owning_module
    for node in graph.nodes if owner is not None else ():
        if node.op == "get_attr" or (node.op == "call_module" and node.target in dict(owner.named_modules())):
            _keep(owner, root, node.target)
    graph.lint()
    return fx.GraphModule(root, graph)
