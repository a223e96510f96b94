"""The forward that runs the graphs of a transformed module, and how it is found behind what a library has wrapped around it.

Libraries set ``module.forward`` to a function around the one that they find there (mixed precision of accelerate), as a method so that
copies of the module call the copy.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import nn

KEPT = "_plumb_forward"


def run_kept(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Runs the transformed forward of `module`: the function of which that forward is the method."""
    return module.__dict__[KEPT](*args, **kwargs)


run_kept.__name__ = "forward"  # methods are pickled by name


def forward_of(module: nn.Module) -> Any:
    """Returns the forward that a transform or a Recorder gave the module; None if there is none, or another was put in its place."""
    kept = module.__dict__.get(KEPT)
    return kept if kept is None or _inside(module) in (kept, run_kept) else None


def replaceable_forward(module: nn.Module) -> Any:
    """Returns the transformed forward if another may take its place: what was wrapped around it looks for it at each call."""
    kept = module.__dict__.get(KEPT)
    return kept if kept is None or module.__dict__.get("forward") is kept or _inside(module) is run_kept else None


def _inside(module: nn.Module) -> Any:
    """Returns what the module's forward was wrapped around, of a method its function; None if that does not show."""
    now = module.__dict__.get("forward")
    try:
        inside = inspect.unwrap(now.__func__ if isinstance(now, MethodType) else now)
    except (TypeError, ValueError):  # none, or wrappers in a circle
        return None
    own = isinstance(now, MethodType) and now.__self__ is module
    return inside if own or inside is not run_kept else None


def keep_forward(module: nn.Module, forward: Any) -> None:
    """Puts a transformed forward in the place of the module's, inside of what a library has wrapped around that one."""
    own = module.__dict__
    if replaceable_forward(module) is None or own["forward"] is own[KEPT]:
        own["forward"] = forward
    own[KEPT] = forward


def transformed_part(module: nn.Module) -> str:
    """Returns an expression for the first part of `module` that was transformed, for remedies; "" if there is none."""
    found = (path for path, part in module.named_modules() if path and forward_of(part) is not None)
    return next((f"module.get_submodule('{path}')" for path in found), "")


def wrap_again(module: nn.Module, wrapped: Any) -> None:
    """Puts what a library made of a module's forward, `wrapped`, around that of a copy: a method is the copy's then. A method of the
    class is none: so are unpickled those whose functions cannot be pickled."""
    if isinstance(wrapped, MethodType):
        if wrapped.__func__ is not type(module).forward:
            module.__dict__["forward"] = MethodType(wrapped.__func__, module)
    elif wrapped is not None and not hasattr(wrapped, "prepare"):
        module.__dict__["forward"] = wrapped
