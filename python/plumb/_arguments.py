"""Arguments of another type than a signature says."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from ._errors import InvalidType

_Checked = TypeVar("_Checked", bound=Callable[..., Any])

# By annotation: the method that a value's type has (numpy's numbers and tensors too), and the value's description.
_KINDS = {
    "bool": ("__bool__", "True or False"),
    "int": ("__index__", "a whole number"),
    "float": ("__float__", "a number"),
    "str": ("casefold", "a text"),
}
_ANNOTATION = re.compile(rf"(Optional\[)?({'|'.join(_KINDS)})(\]| \| None)?")


def checked(function: _Checked) -> _Checked:
    """Decorator of a function or class whose arguments are of the types that its signature says: bool, int, float or str,
    each perhaps optional. Others are not looked at. Raises `InvalidType` for an argument of another type."""
    run = function.__init__ if isinstance(function, type) else function
    parameters = inspect.signature(run).parameters
    names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), "")
    found = {name: _ANNOTATION.fullmatch(str(p.annotation)) for name, p in parameters.items()}
    kinds = {name: (*_KINDS[match[2]], bool(match[1] or match[3])) for name, match in found.items() if match}

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in itertools.chain(zip(itertools.chain(names, itertools.repeat(rest)), args), kwargs.items()):
            method, kind, optional = kinds.get(name, ("__class__", "", False))
            if hasattr(type(value), method) or (optional and value is None):
                continue
            default = parameters[name].default
            left_out = "" if default is inspect.Parameter.empty else f", or leave it out: {default!r}"
            called = function if run is function else type(args[0])  # perhaps a class that is derived from this one
            message = f"{name} is {reprlib.repr(value)}, not {kind}"
            raise InvalidType(message, where=f"{called.__name__}()", remedy=f"{kind}{left_out}")
        return run(*args, **kwargs)

    if not isinstance(function, type):
        return call  # type: ignore[return-value]
    function.__init__ = call  # type: ignore[misc]
    return function
