"""Unit scaling of a whole module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from .. import _C
from ..parameter import tag_parameter
from ._apply import Pass, apply_pass, parse

# Modules whose weight belongs to an operator that becomes unit-scaled, and whose bias starts at zero.
_SCALED = (
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def _operator_name(target: Any) -> str:
    """"aten::gelu" of torch.ops.aten.gelu, of an overload, of torch.nn.functional.gelu, or of its name."""
    if isinstance(target, str):
        return target
    name = getattr(target, "_qualified_op_name", None)
    if name is None and hasattr(target, "_schema"):
        name = target._schema.name
    if name is not None:
        return str(name).replace(".default", "")
    if hasattr(torch.ops.aten, getattr(target, "__name__", "")):
        return f"aten::{target.__name__}"
    raise _C.Error(
        f"unit_scale cannot tell which operator {target!r} is\n"
        "  try: a torch.ops operator, a torch.nn.functional function, or a name like 'aten::gelu'"
    )


@dataclass
class _Run:
    replace: list[tuple[str, str]]
    tau_attention: float
    tau_mlp: float
    depth_rule: bool

    def __call__(self, engine: Any) -> dict:
        # Parameters were scaled when the module was transformed: a graph for another shape must not scale them again.
        return parse(_C.unit_scale(engine, self.replace, self.tau_attention, self.tau_mlp, self.depth_rule, False))


def _scale_parameters(module: nn.Module) -> None:
    done: set[int] = set()
    with torch.no_grad():
        for sub in module.modules():
            weights = [getattr(sub, "weight", None)] if isinstance(sub, _SCALED) else []
            biases = [getattr(sub, "bias", None)] if isinstance(sub, _SCALED) else []
            if isinstance(sub, nn.MultiheadAttention):
                weights += [sub.in_proj_weight, sub.q_proj_weight, sub.k_proj_weight, sub.v_proj_weight]
                biases += [sub.in_proj_bias]
            for weight in weights:
                if isinstance(weight, torch.Tensor) and id(weight) not in done and weight.numel() > 1:
                    done.add(id(weight))
                    std = weight.std()
                    if std.is_meta or std > 0:
                        weight.div_(std)
                    if isinstance(weight, nn.Parameter):
                        tag_parameter(weight, "weight")
            for bias in biases:
                if isinstance(bias, torch.Tensor) and id(bias) not in done:
                    done.add(id(bias))
                    bias.zero_()
                    if isinstance(bias, nn.Parameter):
                        tag_parameter(bias, "bias")
            if isinstance(sub, _NORMS):
                for p in sub.parameters(recurse=False):
                    done.add(id(p))
                    tag_parameter(p, "norm")
        for p in module.parameters():
            if id(p) not in done and not hasattr(p, "mup_type"):
                tag_parameter(p, "norm" if p.dim() > 1 else "bias")


def unit_scale(
    module: nn.Module,
    replace: dict[Callable[..., Any] | str, Callable[..., Any] | str] = {},  # noqa: B006 (never written)
    *,
    tau_attention: float = 0.01,
    tau_mlp: float = 0.5,
    depth_rule: bool = False,
) -> nn.Module:
    """A unit-scaled copy of `module` (Unit Scaling, arXiv 2303.11257).

    Operators are replaced by their unit-scaled equivalents, residual adds become weighted ones (`tau_attention` for
    branches with attention, else `tau_mlp`; or u-muP's depth rule), operators after the last residual add lose their
    constraint, weights are divided by their standard deviation, biases become zero, and parameters are tagged for
    :mod:`plumb.optim`. `replace`: operators -> operators, which go first.

    ``print(plumb.transforms.report(m))`` after the first forward says what was done and what was left alone.
    """
    pairs = [(_operator_name(a), _operator_name(b)) for a, b in replace.items()]
    run = _Run(pairs, tau_attention, tau_mlp, depth_rule)
    scaled = apply_pass(module, Pass("unit_scale", run, before=("simulate_format", "track_scales")))
    _scale_parameters(scaled)
    return scaled
