"""The mark that keeps weights of a unit-scaled module from being taken for those of a plain one."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Iterator

import torch
from torch import nn

from . import _C
from ._errors import Error, ErrorKind
from ._transformed import forward_of
from .parameter import keep_tags

# A key of the state dict: torch.nn.Module.load_state_dict names the keys that it does not expect, and those that it misses.
MARK: str = _C.UNIT_SCALED_MARK

# Layers that compute what they are without any factor.
_WITHOUT_FACTOR = (
    nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase,
)  # fmt: skip

_local = threading.local()


def add_mark(state_dict: dict[str, Any], prefix: str = "") -> None:
    state_dict[prefix + MARK] = torch.ones(())


def _add_mark(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    add_mark(state_dict, prefix)


def _take_mark(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    *rest: Any,
) -> None:
    if state_dict.pop(prefix + MARK, None) is None and any(key.startswith(prefix) for key in state_dict):
        missing.append(prefix + MARK)  # torch raises, or with strict=False returns it
    keep_tags(module, state_dict, prefix, local_metadata)
    loaded = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    for p in getattr(forward_of(module), "passes", ()):
        if hasattr(p.run, "values_loaded"):
            p.run.values_loaded(loaded)


def _refuse_alone(path: str, module: nn.Module, args: tuple) -> None:
    for known, by_functions in getattr(_local, "captured", []):
        if id(module) in known:
            # Calls of a custom autograd function, and their repetition in its backward, show in no graph.
            if getattr(_local, "functions", 0):
                by_functions[path] = module
            return
    raise Error(
        f"'{path}' ({type(module).__name__}) was called alone, but is a part of a unit-scaled module: the factors of its "
        "operators are in the graph of the whole",
        kind=ErrorKind.InvalidState,
        remedy="call the whole module, or a part of the plain one that plumb.transforms.fold(module) gives",
    )


@contextlib.contextmanager
def capturing(module: nn.Module) -> Iterator[None]:
    """Context manager in which the module's forward may call its parts."""
    stack = _local.__dict__.setdefault("captured", [])
    stack.append(({id(sub) for sub in module.modules()}, {}))
    try:
        yield
    finally:
        stack.pop()


@contextlib.contextmanager
def inside_function() -> Iterator[None]:
    """Context manager that marks the calls of a custom autograd function."""
    _local.functions = getattr(_local, "functions", 0) + 1
    try:
        yield
    finally:
        _local.functions -= 1


def called_by_functions() -> dict[str, nn.Module]:
    """By path, the parts that custom autograd functions called in the capture that goes on."""
    stack = getattr(_local, "captured", [])
    return stack[-1][1] if stack else {}


def let_alone(module: nn.Module) -> None:
    """From here on the module and its parts may be called alone."""
    for sub in module.modules():
        _drop(sub._forward_pre_hooks, _refuse_alone)


def mark_state_dict(module: nn.Module) -> None:
    module.__dict__[MARK] = True  # torch.distributed.checkpoint looks up every key of a state dict as an attribute
    module.register_state_dict_post_hook(_add_mark)
    module.register_load_state_dict_pre_hook(_take_mark)


def own_load_hook(module: nn.Module) -> None:
    """Gives a shallow copy a hook of its own for loading: the hook of the module that it is a copy of ends with that module."""
    module.__dict__["_load_state_dict_pre_hooks"] = module._load_state_dict_pre_hooks.copy()
    _drop(module._load_state_dict_pre_hooks, _take_mark)
    module.register_load_state_dict_pre_hook(_take_mark)


def is_marked(module: nn.Module) -> bool:
    return _add_mark in module._state_dict_hooks.values()


def mark(module: nn.Module) -> None:
    """Marks the module's state dicts, and lets its layers refuse to be called without the rest."""
    unmark(module)
    mark_state_dict(module)
    for path, sub in module.named_modules():
        # Reading a parametrized weight calls the module that makes it.
        makes_weights = "parametrizations" in path.split(".")
        # A scripted module takes no hook.
        if sub is module or makes_weights or isinstance(sub, (*_WITHOUT_FACTOR, torch.jit.ScriptModule)):
            continue
        if next(sub.parameters(), None) is not None:
            nn.Module.register_forward_pre_hook(sub, functools.partial(_refuse_alone, path))  # a GraphPart refuses others


def _drop(hooks: dict[int, Any], ours: Any) -> None:
    for key, hook in list(hooks.items()):
        known = getattr(hook, "hook", None) or getattr(hook, "func", None) or hook
        if known is ours:
            del hooks[key]


def unmark(module: nn.Module) -> None:
    module.__dict__.pop(MARK, None)
    _drop(module._state_dict_hooks, _add_mark)
    _drop(module._load_state_dict_pre_hooks, _take_mark)
    let_alone(module)
