"""Copies and pickles of transformed modules: what a copy runs reads the copy, also of classes that copy themselves, as torch.fx's."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, Callable

import torch
from torch import nn

from .._errors import Error, ErrorKind
from .._transformed import KEPT, forward_of, wrap_again
from .._unit_scaled import is_marked, mark, own_load_hook

# Attributes that a transform adds to a module.
ADDED = ("forward", KEPT, "extra_repr", "_get_name", "scales_graph", "_slow_forward", "__deepcopy__", "__reduce_ex__")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _cell(cell: types.CellType, memo: dict) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # it has none
        return cell
    copied = _with_copies(held, memo)
    return cell if copied is held else types.CellType(copied)


def _with_copies(held: Any, memo: dict) -> Any:
    """Returns the copy of an object in the memo of a deep copy; of a function one whose closure holds such copies, if it holds any."""
    found = memo.get(id(held))
    if found is not None or not isinstance(held, types.FunctionType) or not held.__closure__:
        return held if found is None else found
    memo[id(held)] = held  # while its closure, which may hold it, is looked through
    cells = tuple(_cell(cell, memo) for cell in held.__closure__)
    if any(cell is not own for cell, own in zip(cells, held.__closure__, strict=True)):
        made = types.FunctionType(held.__code__, held.__globals__, held.__name__, held.__defaults__, cells)
        memo[id(held)] = functools.update_wrapper(made, held)
        made.__kwdefaults__, made.__dict__ = held.__kwdefaults__, {**held.__dict__}
    return memo[id(held)]


def own_hooks(copied: nn.Module, memo: dict) -> None:
    """Gives the modules of a deep copy hooks that write into the copy, as torch's copies do with bound methods only."""
    for module in copied.modules():
        for hooks in (module.__dict__.get(name) or {} for name in _HOOKS):
            hooks.update({key: _with_copies(hook, memo) for key, hook in hooks.items()})


def _attach(module: nn.Module, attach: Callable[..., None], forward: Any) -> nn.Module:
    now = module.__dict__.get("forward")
    module.__dict__["forward"] = module.__dict__[KEPT] = forward  # whose own forward the new one calls
    attach(module, forward.passes_to_copy(), forward.copied_from, forward if forward.module is module else None)
    wrap_again(module, now)
    return module


def _deepcopy(module: nn.Module, attach: Callable[..., None], memo: dict) -> nn.Module:
    own = module.__dict__
    for name in ADDED:  # the copy gets its own
        if name in own:
            memo[id(own[name])] = None
    passes = own[KEPT].passes_to_copy()
    copied = type(module).__deepcopy__(module, memo)
    attach(copied, copy.deepcopy(passes, memo), own[KEPT].copied_from)
    wrap_again(copied, own["forward"])
    return copied


def _copy_fx(module: nn.Module) -> nn.Module:
    copied = torch.fx.GraphModule.__copy__(module)
    own = module.__dict__
    return _attach(copied, own["__reduce_ex__"].args[1], own[KEPT]) if "__reduce_ex__" in own else copied


def _reduce(module: nn.Module, attach: Callable[..., None], protocol: int) -> tuple:
    """Returns how `copy` and `pickle` make the module again. A shallow copy has the module's own attributes, its forward among them:
    `_take_state` is what knows the copy."""
    if protocol < 2:
        raise Error(
            f"a transformed {type(module).__name__} is pickled by protocol {protocol}, which does not know objects of C++",
            kind=ErrorKind.Unsupported,
            remedy="protocol 2 or newer, as torch.save and pickle take by themselves",
        )
    make, args, *rest = type(module).__reduce_ex__(module, protocol)
    args = tuple({k: v for k, v in a.items() if k not in ADDED} if isinstance(a, dict) else a for a in args)
    state, *items = rest or [None]
    return _begun, (make, args, attach), (state, module.__dict__[KEPT]), *items


def _begun(make: Callable[..., nn.Module], args: tuple, attach: Callable[..., None]) -> nn.Module:
    module = make(*args)
    module.__dict__["__setstate__"] = functools.partial(_take_state, module, attach)
    return module


def _take_state(module: nn.Module, attach: Callable[..., None], given: tuple) -> None:
    del module.__dict__["__setstate__"]
    state, forward = given
    if state is not None:
        module.__setstate__(state)
    if forward.module is not module and is_marked(module):
        own_load_hook(module)
    _attach(module, attach, forward)
    if state is None and any(getattr(p.run, "scaling", None) is not None for p in forward.passes):
        mark(module)


def keep_transforms(module: nn.Module, attach: Callable[..., None]) -> None:
    """Lets copies and pickles of `module` be transformed as it is: `attach(module, passes, copied_from)` transforms one."""
    module.__dict__["__reduce_ex__"] = functools.partial(_reduce, module, attach)
    if hasattr(type(module), "__deepcopy__"):
        module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module, attach)
    if isinstance(module, torch.fx.GraphModule):
        type(module).__copy__ = _copy_fx  # a class of this module alone


def forget_transforms(module: nn.Module) -> None:
    """Undoes `keep_transforms`."""
    for name in ("__deepcopy__", "__reduce_ex__"):
        module.__dict__.pop(name, None)


def without_transforms(module: nn.Module) -> None:
    """Takes off what transforms have put beside the module's own attributes."""
    forward = forward_of(module)
    for name in ADDED:
        module.__dict__.pop(name, None)
    if getattr(forward, "own", None) is not None:
        module.__dict__["forward"] = forward.original
