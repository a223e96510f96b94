"""Functions that replace others while a module is captured."""

from __future__ import annotations

import contextlib
import threading
from types import BuiltinFunctionType, FunctionType
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from . import _C, _calls
from ._code_swap import calls_go_to


def _run(old: Callable[..., Any], new: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    _calls.replacing.append((old, new))
    try:
        return new(*args, **kwargs)
    finally:
        _calls.replacing.pop()


def _calls_of(old: FunctionType, new: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Calls of a Python function on this thread go to `new`, except for those that `new` makes itself."""
    thread = threading.get_ident()

    def redirect(original: FunctionType, args: tuple, kwargs: dict) -> Any:
        busy = any(pair[0] is old for pair in _calls.replacing)
        if busy or threading.get_ident() != thread or not _C.is_capturing():
            return original(*args, **kwargs)
        return _run(old, new, args, kwargs)

    return calls_go_to(old, redirect)


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
    """While it lasts, calls of the keys go to the values. Python functions have their code exchanged: see _code_swap.py."""
    with contextlib.ExitStack() as stack:
        others = {}
        for old, new in pairs.items():
            if isinstance(old, FunctionType):
                stack.enter_context(_calls_of(old, new))
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
