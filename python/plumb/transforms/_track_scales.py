"""The scale of every tensor and gradient of a module."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, Iterable

from torch import fx, nn

from .. import _C, functional
from .._fx import find_operator, path, placeholder
from ._apply import CapturedGraph, Pass, apply_pass, forward_of, logger


class Metrics:
    """Measurements of a tensor (``fwd``) and of its gradient (``bwd``, None before backward)."""

    @dataclass
    class Data:
        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int

    def __init__(self, fwd: "Metrics.Data", bwd: "Metrics.Data | None" = None):
        self.fwd, self.bwd = fwd, bwd

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def names() -> list[str]:
        return list(Metrics.Data.__dataclass_fields__)

    @staticmethod
    def get_full_name(short_name: str) -> str:
        return {
            "mean_abs": "mean absolute value",
            "abs_mean": "absolute mean value",
            "std": "standard deviation",
            "abs_max": "absolute maximum",
            "abs_min": "absolute minimum",
            "numel": "number of elements",
        }[short_name]

    @staticmethod
    def full_names() -> list[str]:
        return [Metrics.get_full_name(n) for n in Metrics.names()]


class TrackScalesPass:
    def __init__(self, histogram: bool):
        self.histogram = histogram

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        # One tracker a graph: slots of another shape's graph would mix with these.
        tracker = captured.results["track_scales"] = _C.ScaleTracker(self.histogram)
        report = json.loads(_C.track_scales(captured.engine, tracker))
        for entry in report["entries"]:
            logger.info("adding tracking to node: %s", entry["node"])
        return report

    def __deepcopy__(self, memo: dict) -> "TrackScalesPass":
        return TrackScalesPass(self.histogram)


def _data(values: dict | None) -> Metrics.Data | None:
    if not values:
        return None
    nan = float("nan")
    data = Metrics.Data(*[values.get(n) if values.get(n) is not None else nan for n in Metrics.names()])
    # Of a tensor of one sign both are one number, which was summed up in two ways.
    if abs(data.mean_abs - data.abs_mean) <= 2**-23 * data.mean_abs:
        data.abs_mean = data.mean_abs
    return data


def _attribute_name(full: str, parameter: bool) -> str:
    *path, leaf = full.split(".")
    return "_".join(["self", *(f"modules_{p}" for p in path), "parameters" if parameter else "buffers", leaf])


def _scales_graph(module: nn.Module) -> fx.Graph:
    forward = forward_of(module)
    graph, env = fx.Graph(), {}
    captured = forward.last if forward is not None else None
    if captured is None:
        return graph
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for n in json.loads(_C.scales_graph(captured.engine, captured.results["track_scales"]))["nodes"]:
        name, target = n["name"], n["target"]
        inputs = tuple(env[i] for i in n.get("inputs", []) if i in env)
        clean = name
        if n["kind"] == "output":
            node = graph.output(inputs)
        elif n["kind"] == "placeholder":
            node = placeholder(graph, name)
        elif n["kind"] == "get_attr":
            node = graph.create_node("get_attr", path(target), name=name)
            clean = _attribute_name(target, target in parameters)
        else:
            call = captured.calls.get(name)
            function = call.target if call is not None and call.operator == target else None
            if isinstance(function, str) and inputs:
                node = graph.create_node("call_method", function, inputs, name=name)
            else:
                node = graph.create_node("call_function", function or _function(target), inputs, name=name)
        fwd = _data(n.get("fwd"))
        node.meta.update(
            clean_name=clean.strip("_"), value=name, outputs_float_tensor=fwd is not None,
            requires_grad=bool(n.get("requires_grad")), module=n.get("module", ""), source=n.get("source", ""),
        )  # fmt: skip
        if fwd is not None:
            node.meta["metrics"] = Metrics(fwd, _data(n.get("bwd")))
        env[name] = node
    return graph


def _function(target: str) -> Any:
    """plumb.functional's function of a unit-scaled operator, else the operator itself."""
    namespace, _, name = target.partition("::")
    if namespace == "plumb" and (known := getattr(functional, name.partition(".")[0], None)) is not None:
        return known
    try:
        return find_operator(target)
    except (AttributeError, ValueError):

        def unknown(*args: Any) -> Any:
            raise RuntimeError(f"{target} is not an operator")

        unknown.__name__ = target
        return unknown


def track_scales(module: nn.Module, *, histogram: bool = False) -> nn.Module:
    """A copy of `module` that measures every floating-point tensor, and its gradient, when it runs.

    ``module.scales_graph()`` then gives a :class:`torch.fx.Graph` whose nodes have ``node.meta["metrics"]``
    (:class:`Metrics`); before the first call it is empty. Nodes are named after the variables of the module's forward, and
    their targets are the functions that it called. Values and gradients are those of the module without it; the caller's
    tensors are not touched.
    """
    tracked = apply_pass(module, Pass("track_scales", TrackScalesPass(histogram)))
    tracked.__dict__["scales_graph"] = _ScalesGraph(tracked)
    return tracked


class _ScalesGraph:
    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self) -> fx.Graph:
        return _scales_graph(self.module)

    def __deepcopy__(self, memo: dict) -> "_ScalesGraph":
        return _ScalesGraph(copy.deepcopy(self.module, memo))


def _float_inputs(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a.meta.get("outputs_float_tensor")]


def _require_tracked(graph: fx.Graph) -> None:
    first = next(iter(graph.nodes), None)
    if first is None or "clean_name" not in first.meta:
        raise RuntimeError("the graph is not a result of track_scales(module).scales_graph(), so it has nothing to prune by")


def _remove(graph: fx.Graph, node: fx.Node, by: fx.Node | None) -> None:
    """Users take `by` instead, or lose the argument."""
    for user in list(node.users):

        def swap(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(s for s in map(swap, value) if s is not _GONE)
            return (by if by is not None else _GONE) if value is node else value

        user.args = swap(user.args)
        user.kwargs = {k: v for k, v in ((k, swap(v)) for k, v in user.kwargs.items()) if v is not _GONE}
    graph.erase_node(node)


_GONE = object()


def prune_non_float_tensors(graph: fx.Graph) -> fx.Graph:
    """A copy without nodes that are no floating-point tensors. Users take such a node's only float input, if it has one."""
    _require_tracked(graph)
    graph = copy.deepcopy(graph)
    for node in list(graph.nodes):
        if node.op != "output" and not node.meta.get("outputs_float_tensor"):
            inputs = _float_inputs(node)
            _remove(graph, node, inputs[0] if len(inputs) == 1 else None)
    graph.lint()
    return graph


def prune_same_scale_tensors(graph: fx.Graph, rtol: float = 2**-16) -> fx.Graph:
    """A copy without nodes whose one float input has the same scale (mean absolute value, forward and backward)."""
    _require_tracked(graph)
    graph = copy.deepcopy(graph)

    def close(a: Metrics.Data | None, b: Metrics.Data | None) -> bool:
        if a is None or b is None:
            return a is b
        return abs(a.mean_abs - b.mean_abs) <= rtol * max(abs(a.mean_abs), abs(b.mean_abs))

    for node in list(graph.nodes):
        if node.op == "output" or not node.meta.get("outputs_float_tensor"):
            continue
        inputs = _float_inputs(node)
        if len(inputs) == 1:
            mine, other = node.meta["metrics"], inputs[0].meta["metrics"]
            if close(mine.fwd, other.fwd) and close(mine.bwd, other.bwd):
                _remove(graph, node, inputs[0])
    graph.lint()
    return graph


def prune_selected_nodes(graph: fx.Graph, targets: Iterable[Any]) -> fx.Graph:
    """A copy without nodes of these targets; users take a removed node's first input."""
    _require_tracked(graph)
    graph = copy.deepcopy(graph)
    wanted = set(targets)
    for node in list(graph.nodes):
        if node.op != "output" and (node.target in wanted or getattr(node.target, "overloadpacket", None) in wanted):
            inputs = node.all_input_nodes
            _remove(graph, node, inputs[0] if inputs else None)
    graph.lint()
    return graph
