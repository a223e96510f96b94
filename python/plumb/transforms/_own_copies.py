"""Transformed modules of classes that copy and pickle themselves, and take only what they know along: torch.fx's."""

from __future__ import annotations

import copy
import functools
from typing import Callable

from torch import nn

from .._unit_scaled import mark

# Attributes that a transform adds to a module.
ADDED = ("forward", "extra_repr", "__deepcopy__", "__reduce_ex__")


def _deepcopy(module: nn.Module, attach: Callable[[nn.Module, list], None], memo: dict) -> nn.Module:
    own = module.__dict__
    for name in ADDED:  # the copy gets its own
        memo[id(own[name])] = None
    passes = own["forward"].passes_to_copy()
    copied = type(module).__deepcopy__(module, memo)
    attach(copied, copy.deepcopy(passes, memo))
    return copied


def _reduce(module: nn.Module, attach: Callable[[nn.Module, list], None], protocol: int) -> tuple:
    make, args = type(module).__reduce__(module)[:2]
    args = tuple({k: v for k, v in a.items() if k not in ADDED} if isinstance(a, dict) else a for a in args)
    return _made_again, (make, args, attach, module.__dict__["forward"].passes_to_copy())


def _made_again(make: Callable[..., nn.Module], args: tuple, attach: Callable[[nn.Module, list], None], passes: list) -> nn.Module:
    module = make(*args)
    attach(module, passes)
    if any(getattr(p.run, "scaling", None) is not None for p in passes):
        mark(module)
    return module


def keep_transforms(module: nn.Module, attach: Callable[[nn.Module, list], None]) -> None:
    """Lets copies and pickles of `module` be transformed as it is: `attach(module, passes)` transforms one."""
    module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module, attach)
    module.__dict__["__reduce_ex__"] = functools.partial(_reduce, module, attach)


def without_transforms(module: nn.Module) -> None:
    """Takes off what transforms have put beside the module's own attributes."""
    forward = module.__dict__.get("forward")
    for name in ADDED:
        module.__dict__.pop(name, None)
    if getattr(forward, "own", None) is not None:
        module.__dict__["forward"] = forward.original
