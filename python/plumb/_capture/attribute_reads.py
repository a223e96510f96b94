"""The attributes, globals and hooks that a forward reads, noted while it is captured (`observed()`), and the guards made of them
(`guards_of()`)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import types
from collections import deque
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from .._trees import PLAIN
from .cpython import instructions_of
from .guards import ABSENT, ATTRIBUTE, CELL, DEEPEST, ITEM, Guards
from .torch_patches import INSIDE, HooksOfAllModules, patched

_MEMBERS = 200
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_OF_TORCH = frozenset(vars(nn.Module)) - {"forward"}
_LIBRARY_FOLDERS = tuple({os.path.realpath(p) + os.sep for p in sysconfig.get_paths().values()} | set(INSIDE))
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.BuiltinMethodType,
    functools.partial,
)
_VALUES = (*PLAIN, list, tuple, dict, set, np.ndarray)  # that a guard holds as they are
_LIBRARIES = frozenset({"torch", "plumb", "numpy", "builtins"}) | (
    frozenset(sys.stdlib_module_names) - {"types", "argparse", "__main__"}
)


def _is_object(value: Any) -> bool:
    """Returns whether it is an object of a user's or a library's class, whose attributes may be settings."""
    cls = type(value)
    if isinstance(
        value, (*PLAIN, *_FUNCTIONS, type, nn.Module, Tensor, types.ModuleType, tuple, list, dict, set, deque)
    ):
        return False
    return cls.__module__.partition(".")[0] not in _LIBRARIES


def _is_users(code: types.CodeType) -> bool:
    return not code.co_filename.startswith(("<frozen", *_LIBRARY_FOLDERS))


class Observer:
    """Attributes of modules and plain objects that are read while it is on."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], Any] = {}
        self.mode_line = ""
        self.inner: list[Guards] = []  # guards of the graphs that were called
        self._thread = threading.get_ident()
        self._classes: dict[type, Any] = {}
        self._seen: dict[int, Any] = {}  # objects, which stay as long as their ids are used

    def reader(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def __getattribute__(owner: Any, name: str) -> Any:
            if name in _INTERNAL or name.startswith("__") or threading.get_ident() != self._thread:
                if name == "training" and not self.mode_line and threading.get_ident() == self._thread:
                    self._note_mode(owner, sys._getframe(1))
                return original(owner, name)
            self.reads.setdefault((id(owner), name), owner)
            value = original(owner, name)
            self.look_at(value)
            return value

        return __getattribute__

    def _note_mode(self, owner: Any, frame: types.FrameType) -> None:
        # Operators have the modes that torch's layers give them. Attention leaves its dropout out.
        attention = isinstance(owner, nn.MultiheadAttention) and owner.__dict__.get("dropout")
        if attention or not frame.f_code.co_filename.startswith(INSIDE):
            self.mode_line = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def look_at(self, value: Any, depth: int = 0) -> None:
        """Lets reads of the attributes of an object be noted, and of objects in containers."""
        if isinstance(value, (list, tuple, dict, deque)):
            if depth < DEEPEST and len(value) <= _MEMBERS and id(value) not in self._seen:
                self._seen[id(value)] = value
                for part in value.values() if isinstance(value, dict) else value:
                    self.look_at(part, depth + 1)
            return
        if isinstance(value, (*PLAIN, Tensor, nn.Module)) or id(value) in self._seen or not _is_object(value):
            return
        self._seen[id(value)] = value
        cls = type(value)
        if cls not in self._classes:
            self._classes[cls] = cls.__dict__.get("__getattribute__")
            with contextlib.suppress(TypeError):  # error of a class implemented in C
                cls.__getattribute__ = self.reader(cls.__getattribute__)

    def end(self) -> None:
        for cls, before in self._classes.items():
            with contextlib.suppress(TypeError, AttributeError):
                if before is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = before


def caller_of_read(frame: types.FrameType) -> types.FrameType:
    """Returns the frame, or the one whose read of an attribute it notes."""
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


_observers: list[Observer] = []


@contextlib.contextmanager
def observed() -> Iterator[Observer]:
    """Context manager that notes reads of attributes."""
    observer = Observer()
    _observers.append(observer)
    try:
        with patched(nn.Module, __getattribute__=observer.reader(object.__getattribute__)):
            yield observer
    finally:
        observer.end()
        _observers.remove(observer)


def include(guards: Guards) -> None:
    """The graph that these belong to becomes a part of the one that is captured."""
    if _observers:
        _observers[-1].inner.append(guards)


class _Resolver:
    """Makes guards of reads, when the module is as before the capture."""

    def __init__(self, module: nn.Module, written: set[tuple[int, Any]]):
        self.guards = Guards()
        self.names = {id(sub): name for name, sub in module.named_modules()}
        self.written = written
        self.containers = {at for at, _ in written}
        self._codes: set[tuple] = set()

    def _name(self, owner: Any, key: str) -> str:
        if isinstance(owner, nn.Module) and (path := self.names.get(id(owner))) is not None:
            return f"{path}.{key}" if path else key
        return f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{key}"

    def value(self, kind: int, holder: Any, key: Any, value: Any, name: str) -> None:
        if self.guards.add(kind, holder, key, value, name, self.containers):
            self.functions_in(value)

    def read(self, owner: Any, key: str) -> None:
        name = self._name(owner, key)
        own = getattr(owner, "__dict__", None)
        if isinstance(owner, type):
            value = getattr(owner, key, None)
            if getattr(value, "__self__", None) is owner:  # a method of the class: another object at every read
                self.functions_in(value)
            else:
                self.value(ATTRIBUTE, owner, key, value, name)
            return
        if isinstance(own, dict):
            # A list that the forward lengthens or empties may be replaced: nothing of it is read again.
            if (id(own), key) in self.written or (id(own.get(key)), None) in self.written:
                return
            if key in own:
                self.value(ITEM, own, key, own[key], name)
                return
        if isinstance(owner, nn.Module):
            for table in (own.get("_parameters"), own.get("_buffers")):
                if isinstance(table, dict) and key in table:
                    if table[key] is None:
                        self.value(ITEM, table, key, None, name)
                    return
            if key in (own.get("_modules") or ()) or key in _OF_TORCH:
                return
        found = inspect.getattr_static(type(owner), key, _MISSING)
        computed = found is _MISSING or hasattr(type(found), "__set__") and not isinstance(found, property)
        if found is _MISSING and type(owner).__getattribute__ in _PLAIN_READS and not _has_getattr(type(owner)):
            if isinstance(own, dict):
                self.guards.add(ABSENT, own, key, None, name)
        elif computed:  # by code of the class, or a slot
            with contextlib.suppress(Exception):
                value = getattr(owner, key)
                if isinstance(value, _VALUES):
                    self.value(ATTRIBUTE, owner, key, value, name)
        else:
            self._of_class(owner, own, key, found, name)

    def _of_class(self, owner: Any, own: Any, key: str, found: Any, name: str) -> None:
        inside = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        if isinstance(inside, types.FunctionType) and inside.__code__.co_filename.startswith(INSIDE):
            return
        if isinstance(own, dict):
            self.guards.add(ABSENT, own, key, None, name)
        if not isinstance(found, (classmethod, types.MemberDescriptorType)):
            self.value(ATTRIBUTE, type(owner), key, getattr(type(owner), key, None), name)
        self.functions_in(found)

    def members(self, value: Any, name: str) -> None:
        """All attributes of a thing whose reads cannot be noted."""
        for key, part in list(vars(value).items())[:_MEMBERS]:
            if isinstance(part, _VALUES) and not key.startswith("__"):
                if isinstance(value, type):
                    self.value(ATTRIBUTE, value, key, part, f"{name}.{key}")
                else:
                    self.value(ITEM, vars(value), key, part, f"{name}.{key}")

    def functions_in(self, value: Any, depth: int = 0) -> None:
        """Follows functions to what they read outside of themselves."""
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.functions_in(part, depth)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self.functions_in(value.__func__, depth)
        elif isinstance(value, property):
            self.functions_in(value.fget, depth)
        elif isinstance(value, types.FunctionType):
            self.code(value, value.__code__)
        elif isinstance(value, (list, tuple, dict)) and depth < DEEPEST and len(value) <= _MEMBERS:
            for part in value.values() if isinstance(value, dict) else value:
                self.functions_in(part, depth + 1)
        elif isinstance(value, PLAIN):
            return
        elif isinstance(
            wrapped := inspect.getattr_static(value, "__wrapped__", None), types.FunctionType
        ):  # the function that functools.lru_cache wraps
            self.functions_in(wrapped, depth)
        elif isinstance(value, types.SimpleNamespace) or (isinstance(value, type) and _is_users_class(value)):
            self.members(value, getattr(value, "__name__", "SimpleNamespace"))
        elif _is_object(value):
            self.functions_in(inspect.getattr_static(type(value), "__call__", None), depth)

    def code(self, function: types.FunctionType, code: types.CodeType) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        if (code, id(function.__globals__), *map(id, cells.values())) in self._codes or not _is_users(code):
            return
        self._codes.add((code, id(function.__globals__), *map(id, cells.values())))
        for name, chain in instructions_of(code).outer_reads():
            with contextlib.suppress(ValueError):  # an empty cell
                if name in cells:
                    value = cells[name].cell_contents
                    if name != "__class__":
                        self.value(CELL, cells[name], name, value, name)
                elif name in function.__globals__:
                    value = function.__globals__[name]
                    if not isinstance(value, types.ModuleType):
                        self.value(ITEM, function.__globals__, name, value, name)
                else:
                    continue
                self.chain(value, chain, name)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self.code(function, part)

    def chain(self, value: Any, chain: tuple[str, ...], name: str) -> None:
        """Follows the attributes that are read one after the other."""
        for key in chain:
            name = f"{name}.{key}"
            if isinstance(value, types.ModuleType):
                file = getattr(value, "__file__", None)
                if file is None or file.startswith(_LIBRARY_FOLDERS) or key not in vars(value):
                    return
                found = vars(value)[key]
                if not isinstance(found, types.ModuleType):
                    self.value(ITEM, vars(value), key, found, name)
            elif _is_object(value) or (isinstance(value, type) and _is_users_class(value)):
                self.read(value, key)
                found = inspect.getattr_static(value, key, None)
            else:
                return
            value = found
        if _is_object(value) and isinstance(getattr(value, "__dict__", None), dict) and not chain:
            self.members(value, name)

    def hooks(self, module: nn.Module, with_root: bool) -> None:
        for sub in module.modules():
            for key in _HOOKS if sub is not module or with_root else ():
                hooks = sub.__dict__.get(key)
                if isinstance(hooks, dict):
                    self.value(ITEM, sub.__dict__, key, hooks, self._name(sub, "hooks"))
        of_all = HooksOfAllModules()
        self.value(ATTRIBUTE, of_all, "now", of_all.now, "hooks of all modules")

    def parts(self, module: nn.Module) -> None:
        """Which modules a module has, and their classes. A transformed one looks itself (`Tree`)."""
        self.guards.add_classes(module)
        for sub in module.modules():
            if isinstance(parts := sub.__dict__.get("_modules"), dict):  # a scripted module's stays
                self.guards.add(ITEM, sub.__dict__, "_modules", parts, self._name(sub, "modules"), self.containers)

    def forward(self, sub: nn.Module, own: bool) -> None:
        name = self._name(sub, "forward")
        if own and "forward" in sub.__dict__:
            self.value(ITEM, sub.__dict__, "forward", sub.__dict__["forward"], name)
            return
        if own:
            self.guards.add(ABSENT, sub.__dict__, "forward", None, name)
        if not isinstance(sub, torch.jit.ScriptModule):
            self.value(ATTRIBUTE, type(sub), "forward", getattr(type(sub), "forward", None), name)


_MISSING = object()
_PLAIN_READS = (object.__getattribute__, nn.Module.__getattribute__)


def _has_getattr(cls: type) -> bool:
    return any("__getattr__" in vars(c) for c in cls.__mro__ if c is not nn.Module)


def _is_users_class(cls: type) -> bool:
    if cls.__module__.partition(".")[0] in _LIBRARIES or issubclass(cls, (nn.Module, Tensor)):
        return False
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is None or not file.startswith(_LIBRARY_FOLDERS)


def guards_of(
    observer: Observer,
    module: nn.Module,
    written: set[tuple[int, Any]],
    forward: Callable[..., Any] | None,
    parts: bool = False,
) -> Guards:
    """Returns the guards for what a capture of `module` has read. `written`: (id of a dict or container, key) of what
    the forward itself changed. `forward`: was called instead of ``module(...)``. `parts`: holds the modules' parts, too."""
    make = _Resolver(module, written)
    make.hooks(module, with_root=forward is None)
    for sub in module.modules():
        make.forward(sub, own=sub is not module or forward is None)
    if parts:
        make.parts(module)
    if forward is not None:
        make.functions_in(forward)
    for (_, key), owner in observer.reads.items():
        if key != "forward":
            make.read(owner, key)
    for inner in observer.inner:
        make.guards.include(inner)
    make.guards.mode_line = make.guards.mode_line or observer.mode_line
    return make.guards
