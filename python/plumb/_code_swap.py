"""Calls of a Python function go to another for a while.

WARNING: this exchanges ``function.__code__``. Nothing else reaches callers that hold the function itself (``from torch.nn.functional
import gelu``, a default argument, a closure). It relies on CPython, and on three of its details:

- a running interpreter takes a function's code anew at every call, so that an exchange is seen by the next call;
- code with other free variables is refused, so the new code claims those of the old, which it does not read;
- constants of a code object may be any object, so the new code carries its target as a constant.

It is for the whole process while it lasts. The target therefore asks whether a call concerns it, and other calls go to the function
as it was. Only the standard library is used, so that tests can run this under every Python that plumb is for
(tests/test_python_versions.py): run them before a new version of Python is named in pyproject.toml.
"""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import Any, Callable, Iterator


@contextlib.contextmanager
def calls_go_to(function: FunctionType, target: Callable[[FunctionType, tuple, dict], Any]) -> Iterator[None]:
    """While it lasts, ``function(*args, **kwargs)`` is ``target(original, args, kwargs)``. `original` is a copy of the function as it
    was."""
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__

    def redirect(args: tuple, kwargs: dict) -> Any:
        return target(original, args, kwargs)

    def calls_a_constant(*args: Any, **kwargs: Any) -> Any:
        return "redirect".__call__(args, kwargs)  # the constant becomes the function above

    consts = tuple(redirect if c == "redirect" else c for c in calls_a_constant.__code__.co_consts)
    defaults, kwdefaults = function.__defaults__, function.__kwdefaults__
    function.__code__ = calls_a_constant.__code__.replace(
        co_consts=consts, co_freevars=code.co_freevars, co_name=code.co_name
    )
    function.__defaults__ = function.__kwdefaults__ = None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults
