"""Functions that stand in for others while a module is captured."""

from __future__ import annotations

import contextlib
import threading
from types import BuiltinFunctionType, FunctionType
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from . import _C, _calls


def _run(old: Callable[..., Any], new: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    _calls.replacing.append((old, new))
    try:
        return new(*args, **kwargs)
    finally:
        _calls.replacing.pop()


def _pure_python(function: Any) -> bool:
    return isinstance(function, FunctionType)


@contextlib.contextmanager
def _python_function(old: FunctionType, new: Callable[..., Any]) -> Iterator[None]:
    """Whoever has the function has the object, so its code is exchanged: calls on this thread go to `new`."""
    code, thread = old.__code__, threading.get_ident()
    original = FunctionType(code, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
    original.__kwdefaults__ = old.__kwdefaults__

    def forward(args: tuple, kwargs: dict) -> Any:
        # A replacement may use what it replaces, and other threads are not concerned.
        busy = any(pair[0] is old for pair in _calls.replacing)
        if busy or threading.get_ident() != thread or not _C.is_capturing():
            return original(*args, **kwargs)
        return _run(old, new, args, kwargs)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return "forward".__call__(args, kwargs)  # the constant becomes the function above

    consts = tuple(forward if c == "forward" else c for c in stand_in.__code__.co_consts)
    defaults, kwdefaults = old.__defaults__, old.__kwdefaults__
    old.__code__ = stand_in.__code__.replace(co_consts=consts, co_freevars=code.co_freevars, co_name=code.co_name)
    old.__defaults__ = old.__kwdefaults__ = None
    try:
        yield
    finally:
        old.__code__, old.__defaults__, old.__kwdefaults__ = code, defaults, kwdefaults


class _TorchFunctions(TorchFunctionMode):
    """Calls of torch's own functions go to others, except for those that torch's functions make of one another."""

    def __init__(self, pairs: dict[Any, Callable[..., Any]]):
        super().__init__()
        self.pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        new = self.pairs.get(func)
        if new is not None:
            return _run(func, new, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def replaced(pairs: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, calls of the keys go to the values."""
    with contextlib.ExitStack() as stack:
        others = {}
        for old, new in pairs.items():
            if _pure_python(old):
                stack.enter_context(_python_function(old, new))
            else:
                others[old] = new
        if others:
            stack.enter_context(_TorchFunctions(others))
        yield


def is_torch_function(function: Any) -> bool:
    """A function of torch's, which has an operator of its own name and may itself be unit-scaled."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, BuiltinFunctionType) or module.partition(".")[0] == "torch"
