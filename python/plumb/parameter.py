"""Parameters that carry what u-μP's learning-rate rules need to know."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from typing import Any, Callable, Dict, Literal, Optional, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary
from typing_extensions import TypeGuard

from . import _C
from ._arguments import checked

MupType = Literal["weight", "bias", "norm", "output"]

NAME = "_plumb_name"  # attribute of a tagged parameter: its name in the unit-scaled module, kept where its layer is put elsewhere

_rated = WeakIdKeyDictionary()  # factors of the learning rates that scaled_parameters() made, by parameter
# Optimizers whose rates were looked at, and the places of two groups whose rates ought to differ; none: there are none, or it was said.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []  # the hook, from the first tag on


class ParameterData(Protocol):
    """Attributes that :func:`Parameter` adds to a ``torch.nn.Parameter``."""

    mup_type: MupType
    mup_scaling_depth: Optional[int]
    mup_fan_in: Optional[int]
    shape: torch.Size


def has_parameter_data(parameter: nn.Parameter) -> TypeGuard[ParameterData]:
    """Returns whether the parameter is tagged."""
    depth = getattr(parameter, "mup_scaling_depth", "missing")
    return getattr(parameter, "mup_type", None) in get_args(MupType) and (depth is None or isinstance(depth, int))


def Parameter(
    data: Tensor, mup_type: MupType, mup_scaling_depth: Optional[int] = None, mup_fan_in: Optional[int] = None
) -> nn.Parameter:
    """Returns a ``torch.nn.Parameter`` with these attributes, kept by deep copies and pickling.

    Args:
        mup_type: ``"weight"``, ``"bias"``, ``"norm"`` or ``"output"``: the role, which decides the learning rate.
        mup_scaling_depth: how many layers the parameter's stack has, where depth scales the learning rate.
        mup_fan_in: how many values an output sums over, of a weight that does not have its outputs in its first dimension.
    """
    return tag_parameter(nn.Parameter(data), mup_type, mup_scaling_depth, mup_fan_in)


@checked
def tag_parameter(
    parameter: nn.Parameter, mup_type: MupType, mup_scaling_depth: Optional[int] = None, mup_fan_in: Optional[int] = None
) -> nn.Parameter:
    """Tags a parameter that exists already, and returns it: see :func:`Parameter`."""
    if mup_type not in get_args(MupType):
        raise ValueError(f"mup_type must be one of {', '.join(get_args(MupType))}, not {mup_type!r}.")
    parameter.mup_type = mup_type
    parameter.mup_scaling_depth = mup_scaling_depth
    parameter.mup_fan_in = mup_fan_in
    # copy and pickle look on the object first; nn.Parameter's own methods would drop the tags or keep these methods.
    parameter.__deepcopy__ = _Method(_deepcopy, parameter)
    parameter.__reduce_ex__ = _Method(_reduce_ex, parameter)
    _C.tag(parameter, tag_of(parameter))
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_warn_of_flat_rates))
    return parameter


def tag_of(parameter: ParameterData) -> tuple[MupType, Optional[int], Optional[int]]:
    """Returns a tagged parameter's arguments of :func:`tag_parameter`."""
    return parameter.mup_type, parameter.mup_scaling_depth, getattr(parameter, "mup_fan_in", None)  # older files have no fan-in


def keep_tags(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """Gives tensors that ``load_state_dict(assign=True)`` is about to make a module's parameters the tags of those before: a hook of
    ``register_load_state_dict_pre_hook``."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, before in module.named_parameters(prefix[:-1], remove_duplicate=False):
        if has_parameter_data(before) and isinstance(given := state_dict.get(name), Tensor):
            now = given if isinstance(given, nn.Parameter) else nn.Parameter(given, before.requires_grad)
            state_dict[name] = tag_parameter(now, *tag_of(before))


class _Method:
    """A bound method that does not keep its parameter, whose memory would else be held until Python looks for cycles: that does not
    depend on how large tensors are."""

    def __init__(self, function: Callable, parameter: nn.Parameter):
        self._function, self._parameter = function, TensorWeakRef(parameter)

    def __call__(self, *args: Any) -> Any:
        parameter = self._parameter()
        if parameter is None:
            raise ReferenceError("the parameter that these tags were given to is gone: plumb.parameter.tag_parameter gives them anew")
        return self._function(parameter, *args)


def rated(parameter: Tensor, factor: float) -> None:
    """Says that :func:`plumb.optim.scaled_parameters` has made the parameter's learning rate by this factor."""
    _rated[parameter] = factor


def _warn_of_flat_rates(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Warns at the first step of an optimizer that gives unit-scaled parameters the rates of plain ones, or that has come to do so."""
    if (two := _seen.get(optimizer)) is not None:
        some = [optimizer.param_groups[i]["lr"] for i in two if i < len(optimizer.param_groups)]  # groups may have been taken out
        if len(some) < 2 or isinstance(some[0], Tensor) or some[0] != some[1]:  # a tensor's value may be on a device
            return
    rates = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
    if rates == {0.0}:  # the first step of a warm-up
        return
    if two is None:
        _warn_of_early_rates(optimizer)
    # Rates that differ were chosen by somebody.
    if len(rates) != 1:
        by_factor = {_factor(group): i for i, group in enumerate(optimizer.param_groups)}
        two = [i for factor, i in by_factor.items() if factor][:2]
        _seen[optimizer] = tuple(two) if len(two) == 2 else ()
        return
    _seen[optimizer] = ()
    from . import optim

    factors = {_rated[p] for group in optimizer.param_groups for p in group["params"] if p in _rated}
    if len(factors) > 1:
        warnings.warn(
            f"{type(optimizer).__name__} steps unit-scaled parameters with one learning rate, though they had {len(factors)} for their "
            "size (u-μP): multiply each group's rate instead of setting it, as LambdaLR does; of OneCycleLR, SWALR and the like "
            "max_lr=[g['lr'] for g in optimizer.param_groups], or swa_lr=",
            stacklevel=3,
        )
    tagged = [p for group in optimizer.param_groups for p in group["params"] if has_parameter_data(p) and p not in _rated]
    wrong = [p for p in tagged if optim.lr_scale_func_adam(p) != 1]
    if not wrong:
        return
    kind = type(optimizer)
    ours = getattr(optim, kind.__name__, None) if kind.__module__.startswith("torch.optim") else None
    remedy = f"plumb.optim.{kind.__name__}" if ours is not None else f"{kind.__name__} on plumb.optim.scaled_parameters(...)"
    warnings.warn(
        f"{kind.__module__.partition('.')[0]}'s {kind.__name__} steps {len(tagged)} unit-scaled parameters with one learning rate, "
        f"though {len(wrong)} of them need one for their size (u-μP): use {remedy}",
        stacklevel=3,
    )


def _warn_of_early_rates(optimizer: torch.optim.Optimizer) -> None:
    """Warns of rates that plumb's optimizer made before the first graph showed which parameters are weights."""
    rule = (getattr(optimizer, "_how", None) or [None])[0]
    if rule is None:
        return
    made = [p for group in optimizer.param_groups for p in group["params"] if p in _rated and has_parameter_data(p)]
    early = [p for p in made if float(rule(p)) != _rated[p]]
    if early:
        warnings.warn(
            f"{type(optimizer).__name__} was made before the unit-scaled module first ran: {len(early)} of its {len(made)} learning rates "
            "are not those that these parameters need for their size (u-μP), for the module's graph shows which are weights: call the "
            "module once on a batch, then make the optimizer",
            stacklevel=4,
        )


def _factor(group: dict[str, Any]) -> Optional[float]:
    """Returns the factor of a parameter group that `scaled_parameters` made."""
    return next((_rated[p] for p in group["params"] if p in _rated), None)


def untag_parameter(parameter: nn.Parameter) -> None:
    """Takes away what `tag_parameter` gave, in Python."""
    for name in ("mup_type", "mup_scaling_depth", "mup_fan_in", NAME, "__deepcopy__", "__reduce_ex__"):
        vars(parameter).pop(name, None)


def tell_engine(parameter: Tensor) -> None:
    """Tags that were set or changed as attributes: the engine writes its own into files and stages."""
    if has_parameter_data(parameter):
        _C.tag(parameter, tag_of(parameter))


def made_from(tensor: Tensor) -> nn.Parameter:
    """Returns a parameter on a tensor of the engine's, with its tag."""
    parameter = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    tag = _C.tag_of(tensor)
    return parameter if tag is None else tag_parameter(parameter, *tag)


def _deepcopy(self: nn.Parameter, memo: Dict[int, Any]) -> nn.Parameter:
    copy = nn.Parameter.__deepcopy__(self, memo)
    vars(copy).update({k: v for k, v in vars(self).items() if k == NAME})
    return tag_parameter(copy, *tag_of(self))


def _reduce_ex(self: nn.Parameter, protocol: int) -> Any:
    state = {k: v for k, v in vars(self).items() if k not in ("__deepcopy__", "__reduce_ex__")}
    return _rebuild, (self.data, self.requires_grad, OrderedDict(), state)


def _rebuild(data: Tensor, requires_grad: bool, hooks: OrderedDict, state: Dict[str, Any]) -> nn.Parameter:
    parameter = torch._utils._rebuild_parameter(data, requires_grad, hooks)
    vars(parameter).update(state)
    return tag_parameter(parameter, *tag_of(parameter))


__all__ = ["MupType", "Parameter", "ParameterData", "has_parameter_data", "tag_parameter"]
