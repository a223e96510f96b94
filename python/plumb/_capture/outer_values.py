"""Reads of functions from outside of themselves: globals, cells of closures, modules that they import, functions that others wrap."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import types
from collections import deque
from typing import Any, Iterator, NamedTuple

from torch import Tensor, nn

from .._trees import PLAIN
from .cpython import instructions_of
from .torch_patches import INSIDE

FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.BuiltinMethodType,
    functools.partial,
)
CONTAINERS = (list, tuple, dict, set, deque)
_LIBRARY_FOLDERS = tuple(
    {os.path.realpath(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(INSIDE)
)
_LIBRARIES = frozenset({"torch", "plumb", "numpy", "builtins"}) | (
    frozenset(sys.stdlib_module_names) - {"types", "argparse", "collections", "_thread", "__main__"}
)


def is_of_library(module: str) -> bool:
    """Returns whether a module of this name is torch's, plumb's, NumPy's or Python's, whose objects are no settings."""
    return module.partition(".")[0] in _LIBRARIES


def is_users(code: types.CodeType) -> bool:
    return not code.co_filename.startswith(("<frozen", *_LIBRARY_FOLDERS))


def is_users_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(_LIBRARY_FOLDERS)


def is_users_class(cls: type) -> bool:
    """Returns whether a class was written by the user, torch's modules among its bases or not."""
    if is_of_library(cls.__module__) or issubclass(cls, Tensor):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is None or not file.startswith(_LIBRARY_FOLDERS)


def users_classes(cls: type) -> list[type]:
    """Returns the class and its bases, without those of libraries."""
    return [c for c in cls.__mro__ if is_users_class(c)]


class OuterRead(NamedTuple):
    """`name` is read from `holder`, the dict of a module or a cell; None: it is a module that the code imports. `chain`: the
    attributes that are read from `value` one after the other."""

    holder: Any
    name: str
    value: Any
    chain: tuple[str, ...]


def outer_reads(function: types.FunctionType) -> Iterator[OuterRead]:
    """Yields what a function, and the functions that it defines, read outside of it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    codes = [function.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for name, chain in instructions_of(code).outer_reads():
            if name.startswith("import "):
                module = _imported(name.removeprefix("import "), function.__globals__)
                if module is not None:
                    yield OuterRead(None, name, module, chain)
            elif name in cells:
                if cells[name] != types.CellType():
                    yield OuterRead(cells[name], name, cells[name].cell_contents, chain)
            elif name in function.__globals__:
                yield OuterRead(function.__globals__, name, function.__globals__[name], chain)


def class_reads(function: types.FunctionType) -> set[str]:
    """Returns names that the function, and the functions that it defines, read from classes."""
    codes, names = [function.__code__], set()
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        names |= instructions_of(code).class_reads()
    return names


def _imported(name: str, of: dict) -> types.ModuleType | None:
    package = of.get("__package__") or of.get("__name__", "").rpartition(".")[0]
    try:
        return sys.modules.get(importlib.util.resolve_name(name, package))
    except ImportError:
        return None


def functions_behind(value: Any) -> list[Any]:
    """Returns what a callable hands its calls to: the parts of a partial function, a method's function and object, the function that a
    decorator of a library wraps."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, functools.partialmethod):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, types.FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if is_users(value.__code__):
            return defaults
        cells = [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
        inside = [c for c in cells if callable(c) and not isinstance(c, (type, nn.Module))]
        return [value.__dict__.get("__wrapped__"), *inside, *_registered(value)]
    wrapped = inspect.getattr_static(value, "__wrapped__", None)  # by functools.lru_cache, torch.compile
    return [wrapped] if isinstance(wrapped, types.FunctionType) else []


def _registered(function: types.FunctionType) -> list[Any]:
    """Returns the functions of a functools.singledispatch."""
    registry = function.__dict__.get("registry")
    return list(registry.values()) if isinstance(registry, types.MappingProxyType) else []


def is_object(value: Any) -> bool:
    """Returns whether it is an object of a user's or a library's class, whose attributes may be settings."""
    cls = type(value)
    if isinstance(value, (*PLAIN, *FUNCTIONS, type, nn.Module, Tensor, types.ModuleType)) or cls in CONTAINERS:
        return False
    if isinstance(value, CONTAINERS) and (cls.__module__ == "collections" or not hasattr(value, "__dict__")):
        return False
    return not is_of_library(cls.__module__)


def parts_of_class(cls: type) -> list[Any]:
    """Returns what is found in a class of the user's without a read of an attribute: functions for operators, calls and loops, and
    objects such as descriptors."""
    return [
        part
        for c in users_classes(cls)
        for name, part in vars(c).items()
        if is_object(part) or (name.startswith("__") and name != "__init__" and isinstance(part, types.FunctionType))
    ]
