"""Optimizers with u-μP's learning rates: one rate serves every width and depth (arXiv 2407.17465, table 2).

:class:`Adam`, :class:`AdamW` and :class:`SGD` are torch's own with scaled rates; :func:`scaled_parameters` makes the same
parameter groups for any other optimizer.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import _C
from ._state import is_distributed
from .parameter import ParameterData, has_parameter_data, rated, tag_of

LrScale = Callable[[ParameterData], float]


def lr_scale_for_depth(param: ParameterData) -> float:
    """1 / sqrt(depth) for a parameter inside a stack of layers, else 1."""
    return 1 if param.mup_scaling_depth is None else param.mup_scaling_depth**-0.5


def lr_scale_func_adam(param: ParameterData) -> float:
    """Returns the factor on the learning rate for optimizers whose updates do not depend on the gradient's size."""
    return _C.lr_scale(tag_of(param), param.shape, None)


def _lr_scale_func_sgd_constrained(param: ParameterData) -> float:
    return _C.lr_scale(tag_of(param), param.shape, "to_output_scale")


def lr_scale_func_sgd(readout_constraint: Optional[str]) -> LrScale:
    """The factor for SGD. ``readout_constraint`` is the constraint of the network's :class:`plumb.LinearReadout`.

    Without one gradients have unit scale and Adam's rule holds; with ``"to_output_scale"`` they shrink with the width.
    """
    if readout_constraint is None:
        return lr_scale_func_adam
    if readout_constraint == "to_output_scale":
        return _lr_scale_func_sgd_constrained
    raise ValueError(f"readout_constraint must be None or 'to_output_scale', not {readout_constraint!r}.")


def scaled_parameters(
    params: ParamsT,
    lr_scale_func: LrScale,
    lr: Union[None, float, Tensor] = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> ParamsT:
    """Parameter groups, one a parameter, with scaled learning rates.

    Args:
        params: parameters, groups of them (a group's own ``lr`` and ``weight_decay`` come first), or either by name, as
            ``named_parameters()`` has them.
        lr_scale_func: the rule, for example :func:`lr_scale_func_adam`.
        independent_weight_decay: a step decays by ``weight_decay`` whatever the learning rate is at its peak.
        allow_non_unit_scaling_params: let parameters without a tag pass, unscaled, instead of a ValueError.
    """
    result = []
    for entry in params:
        group = {"params": [entry]} if isinstance(entry, (Tensor, tuple)) else dict(entry)
        if "params" not in group:
            raise ValueError(f"A parameter group has no 'params': its keys are {', '.join(map(repr, group)) or 'none'}.")
        rest = {k: v for k, v in group.items() if k not in ("params", "lr", "weight_decay")}
        group_lr = group.get("lr", lr)
        group_decay = group.get("weight_decay", weight_decay)
        if group_lr is None:
            raise ValueError("scaled_parameters needs lr, here or in every parameter group.")
        members = group["params"]
        for member in [members] if isinstance(members, Tensor) else members:
            param = member[1] if isinstance(member, tuple) else member  # torch keeps the name beside it
            scale = 1.0
            if has_parameter_data(param):
                scale = lr_scale_func(param)
            elif not allow_non_unit_scaling_params:
                remedy = "unit_scale() the model, make it a plumb.Parameter, or pass allow_non_unit_scaling_params=True."
                if is_distributed(param):
                    remedy = (
                        "sharding made it anew (DTensor). Before fully_shard(model) keep tags = {name: (p.mup_type,"
                        " p.mup_scaling_depth, p.mup_fan_in) for name, p in model.named_parameters()}, and after it call"
                        " plumb.parameter.tag_parameter(p, *tags[name]) for each."
                    )
                raise ValueError(f"A parameter of shape {tuple(param.shape)} has no mup_type: {remedy}")
            param_lr = group_lr * scale
            decay = group_decay
            if independent_weight_decay and decay:
                if not float(param_lr):
                    raise ValueError("Independent weight decay needs a learning rate other than 0.")
                decay = decay / float(param_lr)
            rated(param, float(scale))
            result.append({"params": [member], "lr": param_lr, "weight_decay": decay, **rest})
    return result


class _Scaled(torch.optim.Optimizer):
    _how: Optional[tuple] = None  # the arguments of scaled_parameters(); None while torch adds the first groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group whose rates are scaled as those of the first ones."""
        for group in [param_group] if self._how is None else scaled_parameters([param_group], *self._how):
            super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_how": self._how}


class SGD(_Scaled, torch.optim.SGD):
    """``torch.optim.SGD`` with u-μP's learning rates; see :func:`scaled_parameters` and, for ``readout_constraint``,
    :func:`lr_scale_func_sgd`."""

    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, Tensor] = 1e-3,
        *args: Any,
        readout_constraint: Optional[str] = None,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **kwargs: Any,
    ) -> None:
        rule = lr_scale_func_sgd(readout_constraint)
        how = (rule, lr, weight_decay, independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(scaled_parameters(params, *how), lr, *args, **kwargs)
        self._how = how


class _ScaledAdam(_Scaled):
    def __init__(
        self,
        params: ParamsT,
        lr: Union[float, Tensor] = 1e-3,
        *args: Any,
        weight_decay: float = 0,
        independent_weight_decay: bool = True,
        allow_non_unit_scaling_params: bool = False,
        **kwargs: Any,
    ) -> None:
        how = (lr_scale_func_adam, lr, weight_decay, independent_weight_decay, allow_non_unit_scaling_params)
        super().__init__(scaled_parameters(params, *how), lr, *args, **kwargs)
        self._how = how


class Adam(_ScaledAdam, torch.optim.Adam):
    """``torch.optim.Adam`` with u-μP's learning rates; see :func:`scaled_parameters`."""


class AdamW(_ScaledAdam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with u-μP's learning rates; see :func:`scaled_parameters`."""


__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]
