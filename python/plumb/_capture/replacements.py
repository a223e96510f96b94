"""Functions that replace others while a module is captured."""

from __future__ import annotations

import contextlib
import operator
import threading
from types import BuiltinFunctionType, FunctionType
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from .. import _C
from . import call_sites
from .cpython import calls_go_to


class Replacements(dict):
    """Functions, and what their calls go to. `called`: those of which there were calls."""

    called: frozenset[Callable[..., Any]] = frozenset()

    def run(self, old: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        self.called |= {old}
        call_sites.replacing.append((old, self[old]))
        try:
            return self[old](*args, **kwargs)
        finally:
            call_sites.replacing.pop()


def _calls_of(old: FunctionType, pairs: Replacements) -> contextlib.AbstractContextManager[None]:
    """Calls of a Python function on this thread go elsewhere, except for those that are made there."""
    thread = threading.get_ident()

    def redirect(original: FunctionType, args: tuple, kwargs: dict) -> Any:
        busy = any(pair[0] is old for pair in call_sites.replacing)
        if busy or threading.get_ident() != thread or not _C.is_capturing():
            return original(*args, **kwargs)
        return pairs.run(old, args, kwargs)

    return calls_go_to(old, redirect)


def is_operator(function: Any) -> bool:
    """Returns one of the module operator's, which stands for ``+``, ``[]``, ``+=``, ... in a forward."""
    return getattr(function, "__module__", None) == "_operator"


# Python's functions that call an operator, under whose name they are replaced, too; sum() calls it for every term.
_CALLING = {abs: operator.abs, pow: operator.pow, sum: operator.add}

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _is_mirrored(written: Any, func: Any) -> bool:
    """Returns whether torch was asked for ``number - tensor``, and so got the tensor first."""
    name = func.__name__
    reflected = name.startswith("__r") and name != "__rshift__"
    return reflected or name.startswith("bitwise_") or _MIRRORED.get(written.__name__) == name


class _TorchFunctions(TorchFunctionMode):
    """Redirects calls of torch's own functions and Python's operators, except those that torch's functions make."""

    def __init__(self, pairs: Replacements):
        super().__init__()
        self.pairs = pairs
        self.has_operators = any(is_operator(old) or old in _CALLING for old in pairs)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for asked in (func, getattr(func, "_overloadpacket", None)):  # an operator stands for its overloads
            if asked in self.pairs:
                return self.pairs.run(asked, args, kwargs)
        if self.has_operators:
            written = call_sites.written()  # "+" and x.add() are one function of torch's
            if isinstance(written, BuiltinFunctionType):
                called = _CALLING.get(written, written)
                old = called if called in self.pairs else written
                if is_operator(called) and old in self.pairs and old is not sum:
                    return self.pairs.run(old, args[::-1] if _is_mirrored(called, func) else args, kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def replaced(pairs: Replacements) -> Iterator[None]:
    """Context manager that redirects calls of the keys to the values. The ``__code__`` of Python functions is swapped: see cpython.py."""
    with contextlib.ExitStack() as stack:
        python = [old for old in pairs if isinstance(old, FunctionType)]
        for old in python:
            stack.enter_context(_calls_of(old, pairs))
        if len(python) < len(pairs):
            stack.enter_context(torch._C._EnableTorchFunction())  # it is off while torch.compile asks for a graph
            stack.enter_context(_TorchFunctions(pairs))
        yield


def is_torch_function(function: Any) -> bool:
    """Returns a function of torch's, which has an operator of its own name and may itself be unit-scaled."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, BuiltinFunctionType) or module.partition(".")[0] == "torch"
