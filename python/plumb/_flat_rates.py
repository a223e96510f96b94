"""A word on optimizers that give unit-scaled parameters the rates of plain ones."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_rated = WeakIdKeyDictionary()  # parameters whose rates scaled_parameters() made
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_watching: list[Any] = []


def rated(parameter: torch.Tensor) -> None:
    _rated[parameter] = True


def watch() -> None:
    """From here on the first step of an optimizer is looked at."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_look_at))


def _look_at(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    from . import optim
    from .parameter import has_parameter_data

    # Rates that differ were chosen by somebody.
    if len({float(group["lr"]) for group in optimizer.param_groups if "lr" in group}) != 1:
        return
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
