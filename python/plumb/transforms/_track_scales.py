"""The scale of every tensor and gradient of a module."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass, field
from html import escape
from typing import Any, Collection, Iterable, Iterator, cast

import torch
from torch import Tensor, fx, nn

from .. import _C, functional
from .._arguments import checked
from .._errors import Error, ErrorKind
from .._fx import find_operator, path, placeholder, with_values
from .._transformed import forward_of
from ._apply import CapturedGraph, Pass, TransformedForward, apply_pass, logger
from .utils import PassBackend


class Metrics:
    """Measurements of a tensor (``fwd``) and of its gradient (``bwd``, None before backward), made of either."""

    @dataclass
    class Data:
        """Measurements of one tensor. ``histogram``, if it was asked for: the number of values by the exponent of their
        power of two; -127 counts zeros and subnormal values, 128 infinities and NaN. Measurements of a device's tensor
        stay on the device until one of them is read."""

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int
        histogram: dict[int, int] | None = field(default=None, repr=False)

        def __getattr__(self, name: str) -> Any:  # reads measurements that are still on the device
            if name not in _FULL_NAMES or "_on_device" not in self.__dict__:
                raise AttributeError(f"Metrics.Data has no '{name}'")
            *values, numel = self.__dict__["_on_device"][:6].tolist()
            self.__dict__.update(vars(_data((*values, int(numel)))))
            self.__dict__.pop("_on_device", None)
            return self.__dict__[name]

        def __getstate__(self) -> dict:
            return {name: getattr(self, name) for name in (*_FULL_NAMES, "histogram")}

    def __init__(self, fwd_tensor: Tensor | Metrics.Data, bwd_tensor: Tensor | Metrics.Data | None = None):
        self.fwd = Metrics.from_tensor(fwd_tensor) if isinstance(fwd_tensor, Tensor) else fwd_tensor
        self.bwd = Metrics.from_tensor(bwd_tensor) if isinstance(bwd_tensor, Tensor) else bwd_tensor

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Measures the gradient."""
        self.bwd = self.from_tensor(bwd_tensor)

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """Measures a floating-point tensor, in one pass over it. A device is not waited for."""
        if t.device.type in ("cpu", "meta", "mps"):  # Metal has no float64
            return _data(_C.measure(t))
        data = object.__new__(Metrics.Data)
        data.__dict__["_on_device"] = torch.ops.plumb.tensor_metrics(t.detach())
        return data

    def __str__(self) -> str:
        return f"fwd: {self.fwd}, bwd: {self.bwd}"

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def names() -> list[str]:
        return list(_FULL_NAMES)

    @staticmethod
    def get_full_name(short_name: str) -> str:
        return _FULL_NAMES[short_name]

    @staticmethod
    def full_names() -> list[str]:
        return list(_FULL_NAMES.values())


_FULL_NAMES = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
}


class TrackScalesPass:
    def __init__(self, histogram: bool):
        self.histogram = histogram

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        # One tracker a graph: slots of another shape's graph would mix with these.
        tracker = captured.results["track_scales"] = _C.ScaleTracker(self.histogram)
        report = _C.track_scales(captured.engine, tracker)
        for entry in report["entries"]:
            logger.info("adding tracking to node: %s", entry["node"])
        return report

    def __deepcopy__(self, memo: dict) -> "TrackScalesPass":
        return TrackScalesPass(self.histogram)


def _data(values: tuple | None) -> Metrics.Data | None:
    if values is None:
        return None
    data = Metrics.Data(*values)
    # For a tensor of one sign both are the same number, summed in two ways.
    if abs(data.mean_abs - data.abs_mean) <= 2**-23 * data.mean_abs:
        data.abs_mean = data.mean_abs
    return data


def _attribute_name(full: str, parameter: bool) -> str:
    *path, leaf = full.split(".")
    return "_".join(["self", *(f"modules_{p}" for p in path), "parameters" if parameter else "buffers", leaf])


def _arguments(node: Any, inputs: tuple) -> tuple[tuple, dict]:
    """Returns the arguments of an operator's call: `inputs` stand for its values, in order; defaults are left out."""
    values = iter(inputs)
    args, kwargs, given = [], {}, 0
    for argument, (name, keyword), arg in zip(find_operator(node.target)._schema.arguments, node.arg_names, node.args):
        is_default = argument.has_default_value() and arg == argument.default_value
        if keyword and not is_default:
            kwargs[name] = with_values(arg, lambda _: next(values))
        elif not keyword:
            args.append(with_values(arg, lambda _: next(values)))
            given = given if is_default else len(args)
    return tuple(args[:given]), kwargs


class ScalesGraph(fx.Graph):
    """A graph that a notebook shows as a table: a row a node, with what is known of it."""

    def _repr_html_(self) -> str:
        return _table(self)

    def __deepcopy__(self, memo: Any = None) -> fx.Graph:
        copied = super().__deepcopy__(memo)  # an fx.Graph
        copied.__class__ = type(self)
        return copied


def _table(graph: fx.Graph) -> str:
    keys = dict.fromkeys(key for node in graph.nodes for key in node.meta if key != "nn_module_stack")
    header = ["opcode", "name", "target", "args", "kwargs", "users", "input_nodes", *keys]
    rows = [
        [n.op, n.name, n.target, n.args, n.kwargs, list(n.users), n.all_input_nodes, *(n.meta.get(k) for k in keys)]
        for n in graph.nodes
    ]

    def line(cells: list, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(header, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _module_stack(path: str, modules: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Returns a module and those around it, outermost first, as torch.export notes them."""
    parts = path.split(".") if path else []
    paths = [".".join(parts[:n]) for n in range(len(parts) + 1)]
    return {p: (p, modules[p]) for p in paths if p in modules}


def _scales_graph(forward: TransformedForward | None) -> fx.Graph:
    graph, env = ScalesGraph(), {}
    captured = forward.last if forward is not None else None
    if captured is None:
        return graph
    parameters = {name for name, _ in forward.module.named_parameters(remove_duplicate=False)}
    calls = {value.name: node for node in captured.engine.graph.nodes for value in node.results}
    modules = {path: f"{type(m).__module__}.{type(m).__qualname__}" for path, m in forward.module.named_modules()}
    for n in _C.scales_graph(captured.engine, captured.results["track_scales"]):
        name, target = n["name"], n["target"]
        inputs = tuple(env[i] for i in n["inputs"])
        clean = name
        if n["kind"] == "output":
            node = graph.output(inputs)
        elif n["kind"] == "placeholder":
            node = placeholder(graph, name)
        elif n["kind"] == "get_attr":
            node = graph.create_node("get_attr", path(target), name=name)
            clean = _attribute_name(target, target in parameters)
        else:
            made, kwargs = calls.get(name), {}
            if made is not None and made.op == "call_function" and made.target == target:
                inputs, kwargs = _arguments(made, inputs)
            call = captured.calls.get(name)
            function = call.target if call is not None and call.operator == target else None
            if isinstance(function, str) and inputs:
                node = graph.create_node("call_method", function, inputs, kwargs, name=name)
            else:
                node = graph.create_node("call_function", function or _function(target), inputs, kwargs, name=name)
        fwd = _data(n["fwd"])
        node.meta.update(
            clean_name=clean.strip("_"), value=name, outputs_float_tensor=fwd is not None,
            requires_grad=n["requires_grad"], module=n["module"], source=n["source"],
        )  # fmt: skip
        if node.op in ("call_function", "call_method"):
            node.meta.update(operator=target, nn_module_stack=_module_stack(n["module"], modules))
        if fwd is not None:
            node.meta["metrics"] = Metrics(fwd, _data(n["bwd"]))
        env[name] = node
    return graph


def _scales_graph_of(module: nn.Module) -> fx.Graph:
    return _scales_graph(forward_of(module))


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


def _refuse_jit(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands for torch's `_slow_forward`, which torch.jit.trace calls."""
    raise Error(
        f"torch.jit.trace would make a program of this {type(module).__name__} that measures nothing: its scales are tracked",
        kind=ErrorKind.Unsupported,
        remedy="trace the module without track_scales",
    )


class TrackedModule(nn.Module):
    """The type that checkers see of what :func:`track_scales` returns. The object itself has the class of the model."""

    def scales_graph(self) -> fx.Graph:
        """The graph of the last forward, measured."""
        raise NotImplementedError("a module is tracked by plumb.transforms.track_scales(module)")


@checked
def track_scales(module: nn.Module, *, histogram: bool = False) -> TrackedModule:
    """Returns a copy of `module` that measures every floating-point tensor, and its gradient, when it runs.

    ``module.scales_graph()`` then gives a :class:`torch.fx.Graph` whose nodes have ``node.meta["metrics"]``
    (:class:`Metrics`); before the first call it is empty. Nodes are named after the variables of the module's forward, and
    their targets are the functions that it called. Values and gradients are those of the module without it; the caller's
    tensors are not touched. Where several calls add to one gradient, each call's part is summed first.
    """
    methods = (("scales_graph", _scales_graph_of), ("_slow_forward", _refuse_jit))
    return cast(TrackedModule, apply_pass(module, Pass("track_scales", TrackScalesPass(histogram), methods=methods)))


@checked
class ScaleTrackingBackend(PassBackend):
    """`track_scales` as a backend, for :func:`plumb.transforms.utils.apply_transform` and for ``torch.compile(backend=...)``.
    ``graph`` is the scales graph of what ran last through it."""

    def __init__(self, histogram: bool = False):
        self.histogram = histogram
        self._forward: TransformedForward | None = None

    @property
    def graph(self) -> fx.Graph:
        return _scales_graph(self._forward)

    def as_pass(self) -> Pass:
        return Pass("track_scales", TrackScalesPass(self.histogram))

    def watch(self, forward: TransformedForward) -> None:
        self._forward = forward


class ScaleTrackingAutogradFunction(torch.autograd.Function):
    """``apply(tensor, node_meta)``: returns a copy of the tensor, which may be written, and puts its :class:`Metrics` and those
    of its gradient into ``node_meta["metrics"]``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, node_meta: dict[str, Any]) -> Tensor:
        ctx.metrics = node_meta["metrics"] = Metrics(t)
        return t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.metrics.set_bwd(grad)
        return grad, None


# --- prune


def _is_float(node: fx.Node) -> bool | None:
    """Returns whether it is a floating-point tensor: as tracked, else as torch's own tracers noted; None if unknown."""
    if "outputs_float_tensor" in node.meta:
        return node.meta["outputs_float_tensor"]
    notes = [node.meta[key] for key in ("val", "example_value", "tensor_meta") if key in node.meta]
    dtypes = [getattr(note, "dtype", None) for note in notes]
    return any(isinstance(d, torch.dtype) and d.is_floating_point for d in dtypes) if notes else None


def _inputs(node: fx.Node) -> list[fx.Node]:
    """In the order of arguments, as often as they are used."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


class _Instead(list):
    """Nodes that stand in an argument's place."""

    def one(self) -> Any:
        """Returns one argument: a node, a tuple of several, or None."""
        return tuple(self) if len(self) > 1 else next(iter(self), None)


def _with_inputs(value: Any, instead: Iterator[_Instead]) -> Any:
    """Returns an argument with other nodes: several where one stood become neighbors, of none None is left."""
    if isinstance(value, fx.Node):
        return next(instead)
    if isinstance(value, (tuple, list)):
        parts = [_with_inputs(v, instead) for v in value]
        spread = itertools.chain.from_iterable((p or [None]) if isinstance(p, _Instead) else [p] for p in parts)
        return tuple(spread) if isinstance(value, tuple) else list(spread)
    if isinstance(value, dict):
        parts = {key: _with_inputs(v, instead) for key, v in value.items()}
        return {key: p.one() if isinstance(p, _Instead) else p for key, p in parts.items()}
    if isinstance(value, slice):
        parts = [_with_inputs(v, instead) for v in (value.start, value.stop, value.step)]
        return slice(*(p.one() if isinstance(p, _Instead) else p for p in parts))
    return value


def _pruned(graph: fx.Graph, how: str, said: str, selected: Collection[fx.Node] = (), rtol: float = 0.0) -> fx.Graph:
    """Returns a copy without what the engine takes out; `said` is logged of each node that goes."""
    if not rtol >= 0:
        raise Error(f"rtol is {rtol}, not a number from 0 on", kind=ErrorKind.InvalidArgument)
    nodes = list(graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        metrics = node.meta.get("metrics")
        scales = [d.mean_abs if d is not None else None for d in (metrics.fwd, metrics.bwd)] if metrics else [None, None]
        inputs = [places[i] for i in _inputs(node)]
        rows.append((inputs, bool(_is_float(node)), node.op == "output", node in selected, *scales))
    kept = dict(_C.prune(how, rows, rtol))
    result, made = ScalesGraph(), {}
    for i, node in enumerate(nodes):
        if i not in kept:
            logger.info(said, node)
            continue
        instead = [_Instead() for _ in rows[i][0]]
        for place, source in kept[i]:
            instead[place].append(made[nodes[source]])
        args, kwargs = _with_inputs((tuple(node.args), dict(node.kwargs)), iter(instead))
        if node.op == "output" and len(args) != 1:  # an output is one thing
            args = (args,)
        made[node] = result.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made[node].meta = copy.copy(node.meta)
    result.lint()
    return result


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, fx.Graph):
        raise TypeError(
            f"graph is a {type(graph).__name__}, not a torch.fx.Graph: that of a tracked module is module.scales_graph()"
        )


def prune_non_float_tensors(graph: fx.Graph) -> fx.Graph:
    """Returns a copy without nodes that are no floating-point tensors. Users take such a node's only float input, or
    None.

    In a graph that was not tracked, the metadata of torch's own tracers tells which ones are. Raises `plumb.Error` if there are none.
    """
    _check_graph(graph)
    if len(graph.nodes) and all(_is_float(node) is None for node in graph.nodes if node.op != "output"):
        raise Error(
            "nothing is known of the dtypes of this graph's values, so there is nothing to prune by",
            kind=ErrorKind.InvalidState,
            remedy="the graph of track_scales(module).scales_graph() after a forward, or one with node.meta['val']",
        )
    return _pruned(graph, "non_float", "pruning non-float node: %s")


@checked
def prune_same_scale_tensors(graph: fx.Graph, rtol: float = 2**-16) -> fx.Graph:
    """Returns a copy without nodes whose one float input has the same scale (mean absolute value, forward and backward)
    within `rtol`. Nodes that were not measured stay."""
    _check_graph(graph)
    if all("metrics" not in node.meta for node in graph.nodes):
        return _pruned(graph, "selected", "")
    return _pruned(graph, "same_scale", "pruning same-scale node: %s", rtol=rtol)


_TORCHS: dict[Any, set[Any]] = {}  # by unit-scaled function: those that it stands for
for _function_of_torch, _scaled in functional.torch_map.items():
    _TORCHS.setdefault(_scaled, set()).add(_function_of_torch)


def _module_classes(node: fx.Node) -> list[Any]:
    """Returns the modules in whose calls the node was made: classes, or their names as torch.export writes them."""
    if not node.op.startswith("call"):  # torch.export notes a module for inputs
        return []
    classes = [of[1] for of in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module" and node.graph.owning_module is not None:
        classes.append(type(node.graph.owning_module.get_submodule(node.target)))
    return classes


def _known_as(node: fx.Node) -> set[Any]:
    """Returns the keys that a node's call can be asked for by: functions, operators, and names of operators."""
    known = {node.target, *_TORCHS.get(node.target, ())}
    operator = node.meta.get("operator") or getattr(node.target, "_name", None)  # "aten::add.Tensor"
    if node.op in ("call_function", "call_method") and isinstance(operator, str):
        base = operator.partition(".")[0]
        known |= {operator, base, base.partition("::")[2]}
        with contextlib.suppress(AttributeError, ValueError):
            overload = find_operator(operator)
            known |= {overload, overload.overloadpacket}
    return known


def _is_of(classes: list[Any], wanted: type) -> bool:
    name = f"{wanted.__module__}.{wanted.__qualname__}"
    return any(issubclass(c, wanted) if isinstance(c, type) else c == name for c in classes)


def prune_selected_nodes(graph: fx.Graph, targets: Iterable[Any]) -> fx.Graph:
    """A copy without nodes of these targets; users take a removed node's inputs, all of them. Any ``torch.fx`` graph will do.

    targets: functions (``F.layer_norm``, ``operator.add``; one of torch's stands for its unit-scaled equivalent too), operators
        and their names (``torch.ops.aten.add`` and ``"aten::add"`` for all overloads, ``"add"`` in all namespaces), module
        classes (``nn.LayerNorm``: what its calls are made of), and names of inputs, parameters and methods. One that no node
        is of is logged as a warning.
    """
    _check_graph(graph)
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise TypeError(f"targets is {targets!r}, not a list of operators, functions or names: [{targets!r}]")
    wanted = set(targets)
    modules = {t for t in wanted if isinstance(t, type) and issubclass(t, nn.Module)}
    chosen, found = set(), set()
    for node in graph.nodes:
        classes = _module_classes(node)
        meant = (wanted & _known_as(node)) | {m for m in modules if _is_of(classes, m)}
        if meant:
            chosen.add(node)
            found |= meant
    for target in wanted - found:
        calls = sorted({_target_name(n.target) for n in graph.nodes if n.op.startswith("call")})
        logger.warning("nothing to prune: %s (the graph calls %s)", _target_name(target), ", ".join(calls) or "nothing")
    return _pruned(graph, "selected", "pruning node: %s", chosen)


def _target_name(target: Any) -> str:
    """Returns the name that torch.fx prints: "torch.nn.functional.gelu"."""
    if isinstance(target, str):
        return target
    with contextlib.suppress(Exception):
        return fx.node._get_qualified_name(target)
    return str(target)
