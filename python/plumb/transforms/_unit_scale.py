"""Unit scaling of a whole module."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn

from .. import _C
from .._errors import Error
from .._replace import is_torch_function
from .._state import state_of
from ..parameter import tag_parameter
from ._apply import Captured, Pass, apply_pass, logger

# Modules whose weights belong to operators that become unit-scaled, and whose biases start at zero.
_SCALED = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
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
    if not is_torch_function(target):
        return None
    return f"aten::{target.__name__}" if hasattr(torch.ops.aten, getattr(target, "__name__", "")) else None


def _split(replace: Mapping[Any, Any]) -> tuple[list[tuple[str, str]], dict[Callable[..., Any], Callable[..., Any]]]:
    """Replacements of operators by operators, made in the graph, and of functions by functions, made while it is captured."""
    operators: list[tuple[str, str]] = []
    functions: dict[Callable[..., Any], Callable[..., Any]] = {}
    for old, new in replace.items():
        a, b = _operator_name(old), _operator_name(new)
        if a is not None and b is not None:
            operators.append((a, b))
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
class _Parameter:
    """What was done to a parameter when the module was transformed."""

    kind: str  # "weight", "bias"
    std: float = 1.0
    before: Tensor | None = None  # a bias's own values

    def undo(self, parameter: Tensor) -> None:
        if self.kind == "weight":
            parameter.mul_(self.std)
        elif self.before is not None:
            parameter.add_(self.before.to(parameter.device, parameter.dtype))


@dataclass
class _Run:
    replace: list[tuple[str, str]]
    tau_attention: float
    tau_mlp: float
    depth_rule: bool
    residual_mult: float
    residual_attn_ratio: float
    scaled: dict[str, _Parameter] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)  # parameters that a graph has shown
    users_tags: set[str] = field(default_factory=set)  # parameters that were tagged before
    versions: dict[str, int] = field(default_factory=dict)

    def __call__(self, module: nn.Module, captured: Captured) -> dict:
        logger.info("running unit scaling backend")
        engine = captured.engine
        mine = _kept(captured)
        text, tags = _C.unit_scale(
            engine, self.replace, self.tau_attention, self.tau_mlp, self.depth_rule, self.residual_mult,
            self.residual_attn_ratio, self.settled | set(self.scaled), set(mine),
        )  # fmt: skip
        report = json.loads(text)
        report["entries"] = _replacements(captured, mine) + report["entries"]
        self._settle(module, engine, report, tags)
        for e in report["entries"]:
            _log(e)
        return report

    def _settle(self, module: nn.Module, engine: Any, report: dict, tags: list) -> None:
        """Brings the module's parameters to what the graph says: which are weights is known for sure only from it."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        names = _names(parameters)
        entries = {e["node"]: e for e in report["entries"] if e["node"] in parameters}
        values = {name: tensor for name, _, tensor, _ in engine.state() if name in entries}
        with torch.no_grad():
            for name, entry in entries.items():
                parameter, done = parameters[name], self.scaled.get(name)
                mine = self._is_untouched(name, parameter)
                if entry["kind"] in ("weight", "bias"):
                    if mine:
                        parameter.copy_(values[name])
                    else:
                        entry.update(kind="left_alone", reason="its values were changed since unit_scale()")
                    for other in names[name]:
                        engine.set_state(other, parameter)
                elif entry["kind"] == "left_alone" and done and mine and name not in self.settled:
                    done.undo(parameter)
                    for other in names[name]:
                        self.scaled.pop(other, None)
                self.settled.update(names[name])
        for name, done in self.scaled.items():
            if name in parameters and name == names[name][0] and name not in entries:
                about = {"from": f"std {done.std:g}"} if done.kind == "weight" else {}
                report["entries"].append({"kind": done.kind, "node": name, **about})
        for name, kind, depth in tags:
            if name in parameters and name not in self.users_tags:
                tag_parameter(parameters[name], kind, depth)

    def _is_untouched(self, name: str, parameter: Tensor) -> bool:
        """Nobody has loaded or written other values since the transform. Of a copied module that is taken as given."""
        return self.versions.get(name, parameter._version) == parameter._version

    def __deepcopy__(self, memo: dict) -> _Run:
        return dataclasses.replace(
            self, scaled=dict(self.scaled), settled=set(self.settled), users_tags=set(self.users_tags), versions={}
        )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "versions": {}}


def _names(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each name, all names of its tensor."""
    by_id: dict[int, list[str]] = {}
    for name, p in parameters.items():
        by_id.setdefault(id(p), []).append(name)
    return {name: by_id[id(p)] for name, p in parameters.items()}


def _kept(captured: Captured) -> dict[str, tuple[Any, Any]]:
    """Nodes made by a replacement of the user's. What torch's own function makes is scaled like any call of it."""
    return {
        name: call.replaced
        for name, call in captured.calls.items()
        if call.replaced is not None and not is_torch_function(call.replaced[1])
    }


def _spoken(function: Any) -> str:
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or str(function)


def _replacements(captured: Captured, mine: Mapping[str, Any]) -> list[dict]:
    entries = []
    first = {id(call): name for name, call in reversed(captured.calls.items())}
    for name, call in captured.calls.items():
        if call.replaced is not None and first[id(call)] == name:
            old, new = map(_spoken, call.replaced)
            reason = "as asked for" if name in mine else "as asked for, then scaled"
            entries.append({"kind": "replaced", "node": name, "from": old, "to": new, "reason": reason})
    return entries


def _log(e: dict) -> None:
    node, kind, reason = e["node"], e["kind"], e.get("reason", "")
    if kind == "residual":
        logger.info("unit scaling function: %s (residual-add, tau=%s)", node, e["tau"])
    elif kind == "replaced" and reason.startswith("as asked for"):
        logger.info("replacing function: %s with %s", node, e["to"])
    elif kind == "replaced" or reason == "it adds a number":  # an add of a number is its own unit-scaled form
        logger.info("unit scaling function: %s", node)
    elif kind == "unconstrained":
        logger.info("unconstraining node: %s", node)
    elif kind == "left_alone":
        logger.debug("leaving alone: %s (%s)", node, reason)


def _role(sub: nn.Module, name: str) -> str | None:
    if isinstance(sub, _SCALED):
        return "weight" if "weight" in name else "bias"
    return None


def _std(weight: Tensor) -> float:
    # plumb measures a tensor in one quick pass, on the CPU.
    return (torch.ops.plumb.tensor_metrics(weight)[2] if weight.is_cpu else weight.std()).item()


def _scale_parameters(module: nn.Module, run: _Run) -> None:
    """Scales what its module says is a weight or a bias. The first graph confirms it, or takes it back, or adds to it."""
    names = _names({n: t for n, _, t, _ in state_of(module)})
    done: set[int] = set()
    with torch.no_grad():
        for path, sub in module.named_modules():
            for name, p in sub.named_parameters(recurse=False):
                full = f"{path}.{name}" if path else name
                kind = _role(sub, name)
                if id(p) in done:
                    continue
                done.add(id(p))
                if hasattr(p, "mup_type"):
                    run.users_tags.update(names[full])
                else:
                    tag_parameter(p, kind or ("norm" if isinstance(sub, _NORMS) or p.dim() > 1 else "bias"))
                if kind == "weight" and p.numel() > 1 and p.is_floating_point():
                    wide = p.detach() if p.dtype == torch.float64 else p.detach().float()
                    std = 1.0 if p.is_meta else _std(wide)
                    if math.isfinite(std) and std > 0:
                        logger.info("unit scaling weight: %s", full)
                        p.copy_(wide.div(std))
                        run.scaled.update({n: _Parameter("weight", std) for n in names[full]})
                elif kind == "bias":
                    logger.info("setting bias to zero: %s", full)
                    run.scaled.update({n: _Parameter("bias", before=p.detach().clone()) for n in names[full]})
                    p.zero_()
    run.versions = {n: p._version for n, p in module.named_parameters(remove_duplicate=False)}


def unit_scale(
    module: nn.Module,
    replace: Mapping[Callable[..., Any] | str, Callable[..., Any] | str] = {},  # noqa: B006 (never written)
    *,
    tau_attention: float = 0.01,
    tau_mlp: float = 0.5,
    depth_rule: bool = False,
    residual_mult: float = 1.0,
    residual_attn_ratio: float = 1.0,
) -> nn.Module:
    """A unit-scaled copy of `module` (Unit Scaling, arXiv 2303.11257).

    Operators are replaced by their unit-scaled equivalents, residual adds become weighted ones (`tau_attention` for
    branches with attention, else `tau_mlp`; or with `depth_rule` u-muP's taus for `residual_mult` and
    `residual_attn_ratio`), operators after the last residual add lose their constraint, weights are divided by their
    standard deviation, biases become zero, and parameters are tagged for :mod:`plumb.optim`.

    replace: what goes first, ``{old: new}``. A function of yours, or of torch's, is replaced wherever the module calls it;
    an operator (``torch.ops.aten.gelu``, ``"aten::gelu"``) wherever it occurs. What a function of yours does is left as it
    is; where `new` is one of torch's functions its unit-scaled equivalent is taken.

    Weights and biases of layers that torch knows are scaled at once; the first forward shows which operators use them, and
    a weight that something else uses, too, then gets its own values back. ``print(plumb.report(m))`` says what was done.
    """
    operators, functions = _split(replace)
    run = _Run(operators, tau_attention, tau_mlp, depth_rule, residual_mult, residual_attn_ratio)
    scaled = apply_pass(module, Pass("unit_scale", run, before=("simulate_format", "track_scales"), replace=functions))
    _scale_parameters(scaled, run)
    return scaled
