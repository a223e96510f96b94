"""Unit scaling of a whole module."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, cast

import torch
from torch import Tensor, nn

from .. import _C
from .._arguments import checked
from .._capture.replacements import is_operator, is_torch_function
from .._capture.spread_modules import spread_by
from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import BUFFER, state_of
from .._unit_scaled import called_by_functions, let_alone, mark, mark_state_dict, unmark
from ..functional import torch_map
from ..parameter import NAME, tag_parameter
from ._apply import CapturedGraph, Module, Pass, apply_pass, copy_module, logger
from ._report import rewritten
from .utils import Backend, PassBackend

# Modules whose weights belong to operators that become unit-scaled, and whose biases start at zero.
_SCALED = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
_UNMATCHED = "asked to be replaced, and "  # how the reason begins of what was found nowhere
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def _operator_name(target: Any) -> str | None:
    """"aten::gelu" of torch.ops.aten.gelu, of an overload, of torch.nn.functional.gelu, or of its name; else None."""
    if isinstance(target, str):
        return target
    name = getattr(target, "_qualified_op_name", None)
    if name is None and hasattr(target, "_schema"):
        name = target._schema.name
    if name is not None:
        return str(name).removesuffix(".default")
    if is_operator(target) or not is_torch_function(target):
        return None
    return f"aten::{target.__name__}" if hasattr(torch.ops.aten, getattr(target, "__name__", "")) else None


def _operator(target: Any) -> Any:
    """The operator that torch.library.custom_op made, and that of a default overload; anything else as it is."""
    target = getattr(target, "_opoverload", target)
    is_default = isinstance(target, torch._ops.OpOverload) and target._overloadname == "default"
    return target.overloadpacket if is_default else target


def _split(replace: Mapping[Any, Any]) -> tuple[list[tuple[str, str]], dict[Callable[..., Any], Callable[..., Any]]]:
    """Replacements of operators by operators, made in the graph, and of functions by functions, made while it is captured."""
    operators: list[tuple[str, str]] = []
    functions: dict[Callable[..., Any], Callable[..., Any]] = {}
    if not isinstance(replace, Mapping):
        raise TypeError(f"replace is a {type(replace).__name__}, not a dict of functions or operators: {{F.gelu: U.gelu}}")
    for old, new in replace.items():
        for what in (old, new):
            if not callable(what) and not isinstance(what, str):
                raise TypeError(f"replace has {what!r}, which is neither a function nor an operator's name")
        old, new = _operator(old), _operator(new)
        a, b = _operator_name(old), _operator_name(new)
        if a is not None and b is not None:
            scaled = None if isinstance(new, str) else torch_map.get(new)
            operators.append((a, b if scaled is None else f"plumb::{scaled.__name__}"))
            continue
        if not callable(new):
            new = getattr(torch.ops, new.partition("::")[0]).__getattr__(new.partition("::")[2].partition(".")[0])
        if isinstance(old, str) or not callable(old):
            raise Error(
                f"unit_scale cannot replace {old!r} by the Python function {getattr(new, '__name__', new)}: where an operator "
                "is called is not known before",
                remedy="the function that calls it, for example torch.nn.functional.gelu, as the key",
            )
        functions[old] = new
    return operators, functions


@dataclass
class UnitScalePass:
    replace: list[tuple[str, str]]
    functions: dict[Callable[..., Any], Callable[..., Any]]
    residuals: tuple[float, float, bool, float, float]  # tau_attention, ..., as unit_scale takes them
    # The scaling of parameters, and which a graph confirmed; None: they are left as they are.
    scaling: Any = field(default_factory=_C.ParameterScaling)
    users_tags: set[str] = field(default_factory=set)  # parameters that were tagged before
    logged: set[str] = field(default_factory=set)  # parameters
    given_back: dict[str, dict] = field(default_factory=dict)  # by parameter, the line of every report
    owners: dict[str, type] = field(default_factory=dict)  # by scaled weight, the class of its module

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        logger.info("running unit scaling backend")
        self.require_weights(module)
        if self.scaling is not None:
            self.scaling.freeze(spread_by(module))
            self.follow_names(module)
        mine = _kept(captured)
        self.give_back(module)
        keep = {name: _takes_constraint(new) for name, (_, new) in mine.items()}
        report, tags = _C.unit_scale(captured.engine, self.replace, self.residuals, self.scaling, keep)
        report["entries"] = _replacements(captured, mine) + _unmatched(captured, self.functions) + list(self.given_back.values()) + report["entries"]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, tag in tags if self.scaling is not None else ():
            if name in parameters and name not in self.users_tags:
                tag_parameter(parameters[name], *tag)
        self.note_owners(module, [e["node"] for e in report["entries"] if e["kind"] == "weight"])
        for e in report["entries"]:
            if e["kind"] in ("weight", "bias"):
                self.log_parameter(e["node"], e["kind"])
            else:
                _log(e)
        return report

    def note_owners(self, module: nn.Module, weights: Iterable[str]) -> None:
        self.owners = {name: type(_owner(module, name)) for name in weights}

    def follow_names(self, module: nn.Module) -> None:
        """Parameters whose layers were put into others (an adapter's) are those that were scaled: not new ones."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for first, *more in {tuple(same) for same in _names(parameters).values()}:
            before = vars(parameters[first]).get(NAME, first)
            if before not in (first, *more) and all([self.scaling.rename(before, name) for name in (first, *more)]):
                setattr(parameters[first], NAME, first)

    def require_weights(self, module: nn.Module) -> None:
        """Raises an Error for a scaled weight that its module computes or packs now: the operator would be a plain one."""
        for name, kind in self.owners.items():
            owner, leaf = _owner(module, name), name.rpartition(".")[2]
            if owner is None or leaf in owner._parameters or leaf in owner._buffers:
                continue
            if isinstance(owner, kind) or _hides(owner, leaf):
                raise Error(
                    f"'{name}' was unit-scaled, and is computed now (pruning, weight norm, another parametrization) or packed "
                    f"(quantization) by a {type(owner).__name__}: its layer would be a plain one, with a weight that is none of "
                    "the plain model's",
                    kind=ErrorKind.InvalidState,
                    remedy="put it on before unit_scale, or make it permanent (prune.remove, remove_parametrizations)",
                )

    def give_back(self, module: nn.Module) -> None:
        """Their own values to the parameters of parts that custom autograd functions call: these compute what they did."""
        if self.scaling is None:
            return
        names = _names(dict(module.named_parameters(remove_duplicate=False)))
        for path, part in called_by_functions().items():
            mine = {f"{path}.{name}": p for name, p in part.named_parameters()}
            if not all([self.scaling.give_back(names[name], p) for name, p in mine.items()]):
                continue  # another graph scales with it
            let_alone(part)
            reason = f"a custom autograd function calls '{path}'"
            self.given_back |= {name: {"kind": "left_alone", "node": name, "reason": reason} for name in mine}

    def before_copy(self, module: nn.Module) -> None:
        for name, kind, tensor, _ in state_of(module) if self.scaling is not None else ():
            self.scaling.look_at(name, tensor, kind == BUFFER)

    def values_loaded(self, names: Iterable[str]) -> None:
        """Other values are in these parameters: the first graph leaves them as they are."""
        for name in names if self.scaling is not None else ():
            self.scaling.mark_changed(name)

    def log_parameter(self, name: str, kind: str) -> None:
        if name not in self.logged:
            logger.info("unit scaling weight: %s" if kind == "weight" else "setting bias to zero: %s", name)
        self.logged.add(name)


def _owner(module: nn.Module, name: str) -> nn.Module | None:
    """Returns the module that has, or had, a parameter; None where there is no module any more."""
    try:
        return module.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None


def _hides(layer: nn.Module, leaf: str) -> bool:
    """Returns whether a layer in the place of another has a weight of this name, or any state, that is no parameter or buffer."""
    shown = {name: id(t) for name, t in (*layer.named_parameters(), *layer.named_buffers())}
    weight = getattr(layer, leaf, None)
    return (weight is not None and id(weight) not in shown.values()) or not layer.state_dict().keys() <= shown.keys()


def _names(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each name, all names of its tensor."""
    by_id: dict[int, list[str]] = {}
    for name, p in parameters.items():
        by_id.setdefault(id(p), []).append(name)
    return {name: by_id[id(p)] for name, p in parameters.items()}


def _kept(captured: CapturedGraph) -> dict[str, tuple[Any, Any]]:
    """Returns nodes made by a replacement of the user's. Torch's own functions among them are scaled like any call."""
    return {
        name: call.replaced
        for name, call in captured.calls.items()
        if call.replaced is not None and not is_torch_function(call.replaced[1])
    }


def _takes_constraint(function: Any) -> bool:
    """Returns whether it takes a constraint, which unit-scaled functions lose after the last residual add."""
    try:
        return "constraint" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _unmatched(captured: CapturedGraph, functions: Mapping[Any, Any]) -> list[dict]:
    reason = _UNMATCHED + "no call of it was found in the forward"
    missing = [_display_name(old) for old in functions if old not in captured.replaced]
    return [{"kind": "left_alone", "node": name, "reason": reason} for name in missing]


def _display_name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or str(function)


def _replacements(captured: CapturedGraph, mine: Mapping[str, Any]) -> list[dict]:
    entries = []
    first = {id(call): name for name, call in reversed(captured.calls.items())}
    for name, call in captured.calls.items():
        if call.replaced is not None and first[id(call)] == name:
            old, new = map(_display_name, call.replaced)
            reason = "as asked for" if name in mine else "as asked for, then scaled"
            entries.append({"kind": "replaced", "node": name, "from": old, "to": new, "reason": reason, "asked": True})
    return entries


def _log(e: dict) -> None:
    node, kind, reason = e["node"], e["kind"], e.get("reason", "")
    if kind == "residual":
        logger.info("unit scaling function: %s (residual-add, tau=%s)", node, e["tau"])
    elif e.get("asked"):
        logger.info("replacing function: %s with %s", node, e["to"])
    elif kind == "replaced" or reason == "it adds a number":  # an add of a number is its own unit-scaled form
        logger.info("unit scaling function: %s", node)
    elif kind == "unconstrained":
        logger.info("unconstraining node: %s", node)
    elif reason.startswith(_UNMATCHED):
        logger.warning("nothing to replace: %s (%s)", node, reason)
    elif kind == "left_alone":
        logger.debug("leaving alone: %s (%s)", node, reason)


def _scale_parameters(module: nn.Module, run: UnitScalePass) -> None:
    """Scales what its layer says is a weight or a bias. The first graph confirms it, or takes it back, or adds to it."""
    names = _names({n: t for n, _, t, _ in state_of(module)})
    done: set[int] = set()
    proposals = []
    for path, sub in module.named_modules():
        for name, p in sub.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if id(p) in done:
                continue
            done.add(id(p))
            kind = ("weight" if "weight" in name else "bias") if isinstance(sub, _SCALED) else None
            if hasattr(p, "mup_type"):
                run.users_tags.update(names[full])
            else:
                tag_parameter(p, kind or ("norm" if isinstance(sub, _NORMS) or p.dim() > 1 else "bias"))
            setattr(p, NAME, full)
            proposals.append((names[full], p, kind))
        for name, buffer in sub.named_buffers(recurse=False):  # only a graph shows which are weights
            proposals.append((names[f"{path}.{name}" if path else name], buffer, None))
    changed = set(run.scaling.propose(proposals))
    scaled = [(first, kind) for (first, *_), _, kind in proposals if first in changed]
    for name, kind in scaled:
        run.log_parameter(name, kind)
    run.note_owners(module, [name for name, kind in scaled if kind == "weight"])


@checked
def unit_scale(
    module: Module,
    replace: Mapping[Callable[..., Any] | str, Callable[..., Any] | str] = {},  # noqa: B006 (never written)
    *,
    tau_attention: float = 0.01,
    tau_mlp: float = 0.5,
    depth_rule: bool = False,
    residual_mult: float = 1.0,
    residual_attn_ratio: float = 1.0,
    preserve: bool = False,
) -> Module:
    """Returns a unit-scaled copy of `module` (Unit Scaling, arXiv 2303.11257).

    Operators are replaced by their unit-scaled equivalents, residual adds become weighted ones (`tau_attention` for
    branches with attention, else `tau_mlp`; or with `depth_rule` u-muP's taus for `residual_mult` and
    `residual_attn_ratio`), operators after the last residual add lose their constraint, weights are divided by their
    standard deviation, biases become zero, and parameters are tagged for :mod:`plumb.optim`.

    replace: what goes first, ``{old: new}``. A function of yours, or of torch's, is replaced wherever the module calls it;
    ``operator.add`` and its like wherever their sign is written; an operator (``torch.ops.aten.gelu``, ``"aten::gelu"``)
    wherever it occurs. What a function of yours does, or an operator, is left as it is, but that after the last residual add
    a function with a parameter `constraint` loses it. Where `new` is one of torch's functions its unit-scaled equivalent is
    taken. A key that nothing matches is reported and logged.

    Weights and biases of layers that torch knows are scaled at once; the first forward shows which operators use them, and
    a weight that something else uses, too, then gets its own values back, to a rounding. ``print(plumb.report(m))`` says what was done.
    A graph (:func:`plumb.capture`) shows it already: its copy is rewritten at once, as by ``run_passes(graph, "unit_scale")``,
    and each weight is scaled once or not at all.

    The weights are of no use to the plain module, whose operators have no factors. :func:`fold` gives weights that are.
    State dicts bear a mark that ``load_state_dict`` of a plain module names, and parts of the result refuse to be called
    alone.

    preserve: for weights that were trained: a graph (:func:`plumb.capture`) becomes a unit-scaled graph of the same function.
    Weights are multiplied by the factors that :func:`fold` divides by, and tensors have unit scale where that is possible;
    ``print(plumb.report(m))`` says where a multiplication stays. Outputs are equal within rounding, for the inputs' sizes
    that the graph was captured with.
    """
    operators, functions = _split(replace)
    residuals = (tau_attention, tau_mlp, depth_rule, residual_mult, residual_attn_ratio)
    if preserve:
        return _preserving(module, operators, functions, residuals)
    run = UnitScalePass(operators, functions, residuals)
    if type(module) is GraphModule:
        return cast(Module, _rewrite(module, run))
    scaled = apply_pass(module, _pass(run))
    _scale_parameters(scaled, run)
    mark(scaled)
    return scaled


def _rewrite(graph: GraphModule, run: UnitScalePass) -> GraphModule:
    """Returns a copy of the graph, rewritten. Nothing is captured: the graph shows already which operators use a weight."""
    scaled = copy_module(graph)
    scaled._reports = (run(scaled, CapturedGraph(scaled._engine, scaled._out_spec, [])),)
    unmark(scaled)
    mark_state_dict(scaled)
    return scaled


def _preserving(module: Module, operators: list, functions: dict, residuals: tuple) -> Module:
    if not isinstance(module, GraphModule) or functions:
        raise Error(
            "unit_scale(preserve=True) works on a graph, whose factors are known, and replaces operators alone",
            kind=ErrorKind.InvalidArgument,
            remedy="unit_scale(plumb.capture(module, *inputs), preserve=True)",
        )
    module.require_its_graph("unit_scale(preserve=True)")
    scaled = rewritten(module, _C.unit_scale_preserving, operators, residuals)
    mark_state_dict(scaled)
    return cast(Module, scaled)


def _pass(run: UnitScalePass) -> Pass:
    later = ("simulate_format", "use_fp8", "track_scales")
    return Pass("unit_scale", run, before=later, replace=run.functions, unit_weights=run.scaling is not None)


class _UnitScalingBackend(PassBackend):
    def __init__(self, replacement_map: Mapping[Any, Any]):
        self.run = functools.partial(UnitScalePass, *_split(replacement_map), (0.01, 0.5, False, 1.0, 1.0), scaling=None)

    def as_pass(self) -> Pass:
        return _pass(self.run())


def unit_scaling_backend(replacement_map: Mapping[Any, Any] = {}) -> Backend:  # noqa: B006 (never written)
    """Returns the graph's part of `unit_scale` as a backend, for :func:`plumb.transforms.utils.apply_transform` and for
    ``torch.compile(backend=...)``: weights and biases keep their values. The map is `unit_scale`'s `replace`."""
    return _UnitScalingBackend(replacement_map)
