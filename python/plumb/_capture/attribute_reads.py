"""Notes what a Python forward reads while it is captured: attributes of modules and plain objects, and what the user's functions
read from outside of themselves, which are globals, cells of closures, modules that they import, and functions that others wrap.
read_guards.py makes guards of it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import os
import sys
import sysconfig
import threading
import types
from collections import deque
from typing import Any, Callable, Iterator, NamedTuple

from torch import Tensor, nn

from .. import _C
from .._trees import PLAIN
from .cpython import instructions_of, line_of
from .guards import DEEPEST, Guards
from .torch_patches import INSIDE, Modules, patched

MEMBERS = 200  # the most parts of a container, or attributes of an object, that are looked at
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WITHOUT_READS = (Tensor, nn.Module, *PLAIN)  # whose reads need not be noted, or are
_ALL_TENSORS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
_INTERNAL = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.BuiltinMethodType,
    functools.partial,
)
_CONTAINERS = (list, tuple, dict, set, deque)
_LIBRARY_FOLDERS = tuple(
    {os.path.realpath(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    | set(INSIDE)
)
_LIBRARIES = frozenset({"torch", "plumb", "numpy", "builtins"}) | (
    frozenset(sys.stdlib_module_names) - {"types", "argparse", "collections", "_thread", "__main__"}
)


def is_of_library(module: Any) -> bool:
    """Returns whether a module of this name is torch's, plumb's, NumPy's or Python's, whose objects are no settings. A class of
    Cython may have a descriptor for its name."""
    return str(module).partition(".")[0] in _LIBRARIES


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
        for name, chain in instructions_of(code).outer_reads:
            if name.startswith("import "):
                module = _imported(name.removeprefix("import "), function.__globals__)
                if module is not None:
                    yield OuterRead(None, name, module, chain)
            elif name in cells:
                if cells[name] != types.CellType():
                    yield OuterRead(cells[name], name, cells[name].cell_contents, chain)
            elif name in function.__globals__:
                yield OuterRead(function.__globals__, name, function.__globals__[name], chain)


def assigned_outside(function: types.FunctionType) -> tuple[bool, dict[str, types.CellType]]:
    """Returns whether a function assigns to global variables, and the cells of a closure's variables that it assigns to, by name."""
    code, cells = function.__code__, dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    stores = [i for i in instructions_of(code).instructions if i.opname in ("STORE_GLOBAL", "STORE_DEREF")]
    written = {i.argval: cells[i.argval] for i in stores if i.argval in cells and cells[i.argval] != types.CellType()}
    return any(i.opname == "STORE_GLOBAL" for i in stores), written


def class_reads(function: types.FunctionType) -> set[str]:
    """Returns names that the function, and the functions that it defines, read from classes."""
    codes, names = [function.__code__], set()
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        names |= instructions_of(code).class_reads
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
    if isinstance(value, (*PLAIN, *_FUNCTIONS, type, nn.Module, Tensor, types.ModuleType)) or cls in _CONTAINERS:
        return False
    if isinstance(value, _CONTAINERS) and (cls.__module__ == "collections" or not hasattr(value, "__dict__")):
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


_NORMS_OF_WEIGHTS = os.path.dirname(nn.utils.__file__) + os.sep


class Observer:
    """Attributes of modules and plain objects that are read while it is on."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str], Any] = {}
        self.mode_line = ""
        self.inner: list[Guards] = []  # guards of the graphs that were called
        self.unnoted: dict[int, Any] = {}  # objects whose reads cannot be noted
        self.all_tensors: dict[int, nn.Module] = {}  # modules that were asked for all of their tensors
        self.plain_tensors: dict[int, Tensor] = {}  # that attributes, globals and closures hold
        self.modules_own: Any = None  # a __getattribute__ that the program has given nn.Module
        self.takes_values = False  # whether values were taken out of tensors that hang on no input
        # parameters and the like that were asked: the question (a property of read_guards.Slot), and what they said
        self.facts: dict[tuple[int, str], tuple[Tensor, str, Any]] = {}
        self.iterators: dict[str, Any] = {}  # attributes that are iterators, and whose they are
        self.asks_results = False  # whether a tensor that hangs on parameters was asked whether it requires a gradient
        self._thread = threading.get_ident()
        self._classes: dict[type, Any] = {}
        self._of_c: set[type] = set()  # classes implemented in C
        self._seen: dict[int, Any] = {}  # objects, which stay as long as their ids are used

    def reader(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        thread_now, thread = threading.get_ident, self._thread

        def __getattribute__(owner: Any, name: str) -> Any:
            if name in _INTERNAL or name.startswith("__") or thread_now() != thread:
                if name == "training" and not self.mode_line and thread_now() == thread:
                    self._note_mode(owner, sys._getframe(1))
                return original(owner, name)
            if name in _ALL_TENSORS and not sys._getframe(1).f_code.co_filename.startswith(INSIDE):
                self.all_tensors[id(owner)] = owner
            self.reads.setdefault((id(owner), name), owner)
            value = original(owner, name)
            if hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
                self.iterators.setdefault(name, owner)
            self.look_at(value)
            return value

        return __getattribute__

    def _note_mode(self, owner: Any, frame: types.FrameType) -> None:
        # Operators have the modes that torch's layers give them. Attention leaves its dropout out; spectral norms, which
        # are no layers, take another path.
        attention = isinstance(owner, nn.MultiheadAttention) and owner.__dict__.get("dropout")
        file = frame.f_code.co_filename
        if attention or not file.startswith(INSIDE) or file.startswith(_NORMS_OF_WEIGHTS):
            self.mode_line = line_of(frame)

    def begin(self, modules: Modules, forward: Any, inputs: list) -> None:
        """Looks at what a forward meets without a read of an attribute: hooks, methods that operators call, inputs."""
        for part in (forward, *inputs):
            self.look_at(part)
        for _, sub in modules:
            if type(sub).__getattribute__ is not nn.Module.__getattribute__:  # its class may read by object's
                self._note_reads(sub)
            for hooks in filter(None, map(sub.__dict__.get, HOOKS)):
                self.look_at(hooks)
        for cls in {type(sub) for _, sub in modules}:
            for part in parts_of_class(cls):
                self.look_at(part)

    def look_at(self, value: Any) -> None:
        """Lets reads of the attributes of objects be noted: of this value, of those in containers, and of those that functions
        read."""
        left = [(value, 0)]
        while left:
            value, depth = left.pop()
            if id(value) in self._seen or isinstance(value, _WITHOUT_READS):
                if type(value) is Tensor:
                    self.plain_tensors[id(value)] = value
                continue
            if isinstance(value, types.MethodType):  # another object at every read
                left += [(value.__func__, 0), (value.__self__, 0)]
                continue
            if isinstance(value, _CONTAINERS):
                if depth >= DEEPEST or len(value) > MEMBERS:
                    continue
                left += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
            elif isinstance(value, type):
                if is_users_class(value) and not issubclass(value, nn.Module):
                    left += [(part, 0) for c in users_classes(value) for part in vars(c).values()]
            else:
                left += [(part, 0) for part in functions_behind(value)]
            if isinstance(value, types.FunctionType) and is_users(value.__code__):
                left += [(part, 0) for read in outer_reads(value) for part in _along(read)]
            self._seen[id(value)] = value
            if is_object(value):
                left += [(part, 0) for part in self._note_reads(value)]

    def _note_reads(self, value: Any) -> list[Any]:
        """Lets reads of an object's attributes be noted. Returns what else is to be looked at."""
        cls = type(value)
        if cls in self._classes:
            return []
        if cls in self._of_c:
            return self._unnoted(value)
        before, parts = cls.__dict__.get("__getattribute__"), parts_of_class(cls)
        try:
            cls.__getattribute__ = self.reader(cls.__getattribute__)
        except (TypeError, AttributeError):  # a class implemented in C
            self._of_c.add(cls)
            return self._unnoted(value)
        self._classes[cls] = before
        return parts

    def _unnoted(self, value: Any) -> list[Any]:
        own = getattr(value, "__dict__", None)
        if not isinstance(own, dict):
            return []
        self.unnoted[id(value)] = value
        return list(own.values())

    @property
    def seen(self) -> list[Any]:
        """Returns the functions and objects that were looked at."""
        return list(self._seen.values())

    @property
    def classes(self) -> set[type]:
        """Returns the classes whose objects' reads were noted."""
        return set(self._classes)

    def end(self) -> None:
        for cls, before in self._classes.items():
            with contextlib.suppress(TypeError, AttributeError):
                if before is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = before
        self._seen.clear()  # which may hold, by a function, what holds this


def _along(read: OuterRead) -> Iterator[Any]:
    """Yields the values that a chain of attributes leads to."""
    value = read.value
    yield value
    for key in read.chain:
        if isinstance(value, types.ModuleType):
            if not is_users_module(value):
                return
            value = vars(value).get(key)
        else:
            value = inspect.getattr_static(value, key, None)
        yield value


def caller_of_read(frame: types.FrameType) -> types.FrameType:
    """Returns the frame, or the one whose read of an attribute it notes."""
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


_observers: list[Observer] = []


def _read_behind_module(owner: nn.Module, name: str) -> Any:
    """Reads an attribute as the bases of the object's class behind nn.Module do."""
    return super(nn.Module, owner).__getattribute__(name)


@contextlib.contextmanager
def observed() -> Iterator[Observer]:
    """Context manager that notes reads of attributes."""
    observer = Observer()
    observer.modules_own = _observers[-1].modules_own if _observers else vars(nn.Module).get("__getattribute__")
    _observers.append(observer)
    try:
        if observer.modules_own is not None:
            reader = observer.reader(observer.modules_own)
        else:
            noting = [observer.reader(read) for read in (object.__getattribute__, _read_behind_module)]
            reader = _C.attribute_reader(*noting, _INTERNAL - {"training"}, nn.Module)
        with patched(nn.Module, __getattribute__=reader):
            yield observer
    finally:
        observer.end()
        _observers.remove(observer)


def note_value() -> None:
    """A value is taken out of a tensor that the capture has not computed from inputs."""
    if _observers:
        _observers[-1].takes_values = True


def note_result() -> None:
    """A tensor that hangs on parameters was asked whether it requires a gradient."""
    if _observers:
        _observers[-1].asks_results = True


def note_fact(tensor: Tensor, question: str, known: Any) -> None:
    """A tensor that hangs on no input was asked whether it requires a gradient or has one, or for its layout."""
    if _observers:
        _observers[-1].facts[id(tensor), question] = tensor, question, known


def include(guards: Guards) -> None:
    """The graph that these belong to becomes a part of the one that is captured."""
    if _observers:
        _observers[-1].inner.append(guards)
