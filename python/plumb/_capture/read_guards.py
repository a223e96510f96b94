"""Makes guards of what attribute_reads.py has noted, when the module is as before the capture."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor, nn

from .._errors import Error, ErrorKind
from .._trees import PLAIN, layout
from .attribute_reads import (
    HOOKS,
    MEMBERS,
    Observer,
    class_reads,
    functions_behind,
    is_object,
    is_users,
    is_users_class,
    is_users_module,
    outer_reads,
    parts_of_class,
    users_classes,
)
from .guards import ABSENT, ATTRIBUTE, CELL, DEEPEST, ITEM, MISSING, TENSOR, Guards, containers_in
from .torch_patches import INSIDE, HooksOfAllModules, Modules

_LARGEST = 10_000  # elements of a tensor whose value is held
_TABLES = ("_parameters", "_buffers", "_modules")
_OF_TORCH = frozenset(vars(nn.Module)) - {"forward"}
_VALUES = (*PLAIN, list, tuple, dict, set, np.ndarray)  # that a guard holds as they are


# --- objects of which one property says whether something is as it was: guards compare it like any attribute ---


class Setting:
    """A setting of torch, by the name of the function that returns it."""

    def __init__(self, name: str):
        self._name = name

    @property
    def now(self) -> Any:
        return getattr(torch, self._name)()


class FunctionModes:
    """Changes to torch's functions: the default device, unless it is the CPU, and the classes of the user's modes."""

    @property
    def now(self) -> tuple[Any, ...]:
        if not torch._C._len_torch_function_stack():
            return ()
        modes = torch.overrides._get_current_function_mode_stack()
        devices = [m.device for m in modes if isinstance(m, torch.utils._device.DeviceContext) and m.device.type != "cpu"]
        return (*devices[-1:], *[type(m) for m in modes if type(m).__module__.partition(".")[0] not in ("torch", "plumb")])


class Place:
    """A place in a list."""

    def __init__(self, of: list, at: int):
        self._list, self._at = of, at

    @property
    def value(self) -> Any:
        return self._list[self._at] if self._at < len(self._list) else MISSING


class Asked:
    """An attribute that an object's own code was asked for."""

    def __init__(self, owner: Any, key: str):
        self._owner, self._key = owner, key

    @property
    def is_there(self) -> bool:
        return hasattr(self._owner, self._key)


class Value:
    """A tensor whose value was taken, and a copy of it."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._copy = tensor, tensor.detach().clone()

    @property
    def unchanged(self) -> bool:
        a, b = self._tensor.detach(), self._copy
        if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())


class Slot:
    """A tensor, which a table has under a key, as the forward asked about it."""

    def __init__(self, table: dict[str, Tensor], key: str):
        self._table, self._key = table, key

    @property
    def requires_grad(self) -> bool:
        return self._table[self._key].requires_grad

    @property
    def layout(self) -> Any:
        return layout(self._table[self._key])

    @property
    def grad(self) -> Tensor | None:
        return self._table[self._key].grad


class Names:
    """The names of the parameters and buffers of a module."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._names = self._now()

    def _now(self) -> list[list[str]]:
        return [[*sub._parameters, *sub._buffers] for sub in self._module.modules()]

    @property
    def unchanged(self) -> bool:
        return self._now() == self._names


class AbsentOfClass:
    """An attribute that a class does not have."""

    def __init__(self, cls: type, key: str):
        self._classes, self._key = cls.__mro__, key

    @property
    def is_absent(self) -> bool:
        return not any(self._key in vars(cls) for cls in self._classes)


# --- guards of reads ---


class _Resolver:
    """Makes guards of reads, when the module is as before the capture."""

    def __init__(self, modules: Modules, written: set[tuple[int, Any]]):
        self.guards = Guards()
        self.modules = modules
        self.names = {id(sub): name for name, sub in modules}
        self.written = written
        self.containers = {at for at, _ in written}
        self._codes: set[tuple] = set()
        self._absent_of_class: dict[tuple[type, str], AbsentOfClass] = {}
        self._class_names: set[str] = set()  # names of attributes that are read from classes

    def _name(self, owner: Any, key: str) -> str:
        if isinstance(owner, nn.Module) and (path := self.names.get(id(owner))) is not None:
            return f"{path}.{key}" if path else key
        return f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{key}"

    def value(self, kind: int, holder: Any, key: Any, value: Any, name: str) -> None:
        if self.guards.add(kind, holder, key, value, name, self.containers):
            self.functions_in(value)
            for container in containers_in(value) if self.containers else ():
                if id(container) in self.containers:
                    self._beside_written(container, name)

    def _beside_written(self, container: Any, name: str) -> None:
        """The slots of a container that the forward has not written, while it has written others."""
        if isinstance(container, dict):
            for key, value in container.items():
                if (id(container), key) not in self.written:
                    self.value(ITEM, container, key, value, f"{name}[{key!r}]")
        elif isinstance(container, list) and (id(container), None) not in self.written:
            for place, value in enumerate(container):
                if (id(container), place) not in self.written:
                    self.value(ATTRIBUTE, Place(container, place), "value", value, f"{name}[{place}]")

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
                if isinstance(tensor := own[key], Tensor):
                    self.guards.add(TENSOR, own, key, (tensor.dtype, tensor.device, tensor.shape), name)
                return
        if isinstance(owner, nn.Module):
            for table in (own.get("_parameters"), own.get("_buffers")):
                if isinstance(table, dict) and key in table:
                    if table[key] is None or id(owner) not in self.names:  # the tensors of other modules are constants
                        self.value(ITEM, table, key, table[key], name)
                    return
            if key in (own.get("_modules") or ()) or key in _OF_TORCH:
                return
        found = inspect.getattr_static(type(owner), key, MISSING)
        computed = found is MISSING or hasattr(type(found), "__set__") and not isinstance(found, property)
        if found is MISSING and type(owner).__getattribute__ in _PLAIN_READS and not _has_getattr(type(owner)):
            self._absent(owner, own, key, name)
        elif computed:  # by code of the class, or a slot
            try:
                value = getattr(owner, key)
            except Exception:
                self.guards.add(ATTRIBUTE, Asked(owner, key), "is_there", False, name)
                return
            if isinstance(value, _VALUES) or isinstance(found, types.MemberDescriptorType):
                self.value(ATTRIBUTE, owner, key, value, name)
        else:
            self._of_class(owner, own, key, found, name)

    def _absent(self, owner: Any, own: Any, key: str, name: str) -> None:
        """An attribute that was asked for and is not there: neither in the object nor in its class."""
        tables = [own, *(own.get(table) for table in _TABLES)] if isinstance(owner, nn.Module) else [own]
        for table in tables:
            if isinstance(table, dict):
                self.guards.add(ABSENT, table, key, None, name)
        absent = self._absent_of_class.setdefault((type(owner), key), AbsentOfClass(type(owner), key))
        self.guards.add(ATTRIBUTE, absent, "is_absent", absent.is_absent, name)

    def _of_class(self, owner: Any, own: Any, key: str, found: Any, name: str) -> None:
        inside = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        if (
            isinstance(inside, types.FunctionType)
            and inside.__code__.co_filename.startswith(INSIDE)
            and not hasattr(inside, "__wrapped__")
        ):
            return
        if isinstance(own, dict):
            self.guards.add(ABSENT, own, key, None, name)
        self._in_class(type(owner), key, found, name)

    def _in_class(self, cls: type, key: str, found: Any, name: str) -> None:
        """`found`: what the class, or a base of it, has under this key."""
        value = MISSING
        if not isinstance(found, (classmethod, types.MemberDescriptorType)):
            with contextlib.suppress(Exception):
                value = getattr(cls, key)
        # A value that a descriptor computes may be another object at every read.
        if value is found or isinstance(found, staticmethod) or isinstance(value, (types.FunctionType, *_VALUES)):
            self.value(ATTRIBUTE, cls, key, value, name)
        self.functions_in(found)

    def class_attributes(self, classes: set[type]) -> None:
        """Attributes that functions read from a class (of ``super()``, ``type(self)``), of all classes that may be meant."""
        users = dict.fromkeys(c for cls in classes for c in users_classes(cls))
        done: set[str] = set()
        while new := self._class_names - done:
            done |= new
            for cls in users:
                for key in new & vars(cls).keys():
                    self._in_class(cls, key, vars(cls)[key], f"{cls.__name__}.{key}")

    def tensors(self, observer: Observer, module: nn.Module) -> None:
        """Holds what tensors returned: all names, values of those that are no state of the module, whether they require a gradient."""
        for sub in observer.all_tensors.values():
            self.guards.add(ATTRIBUTE, Names(sub), "unchanged", True, self._name(sub, "parameters"))
        if observer.takes_values:
            state = {id(t) for t in (*module.parameters(), *module.buffers())}
            for tensor in observer.plain_tensors.values():
                if id(tensor) not in state and tensor.numel() <= _LARGEST:
                    self.guards.add(ATTRIBUTE, Value(tensor), "unchanged", True, "the value of a tensor")
        if observer.facts or observer.asks_results:
            self._facts(observer, module)

    def _facts(self, observer: Observer, module: nn.Module) -> None:
        slots = {
            id(tensor): (table, key, self._name(sub, key))
            for _, sub in self.modules
            for table in (sub._parameters, sub._buffers)
            if isinstance(table, dict)  # not of a scripted module
            for key, tensor in table.items()
        }
        asked = [(p, "requires_grad", p.requires_grad) for p in module.parameters()] if observer.asks_results else []
        for tensor, question, known in [*observer.facts.values(), *asked]:
            table, key, name = slots.get(id(tensor), ({"": tensor}, "", "a tensor"))
            self.guards.add(ATTRIBUTE, Slot(table, key), question, known, f"{name}.{question}")

    def members(self, value: Any, name: str) -> None:
        """All attributes of a thing whose reads cannot be noted."""
        of_class = isinstance(value, type)
        owners = users_classes(value) if of_class else [value]
        for key, part in [item for owner in owners for item in vars(owner).items()][:MEMBERS]:
            if not of_class:
                self.value(ITEM, vars(value), key, part, f"{name}.{key}")
            elif isinstance(part, _VALUES) and not key.startswith("__"):
                self.value(ATTRIBUTE, value, key, getattr(value, key), f"{name}.{key}")

    def functions_in(self, value: Any, depth: int = 0) -> None:
        """Follows functions to what they read outside of themselves."""
        if isinstance(value, types.FunctionType):
            if not self.code(value):
                return
        elif isinstance(value, (list, tuple, dict)) and depth < DEEPEST and len(value) <= MEMBERS:
            for part in value.values() if isinstance(value, dict) else value:
                self.functions_in(part, depth + 1)
            return
        elif isinstance(value, (*PLAIN, Tensor, nn.Module)):
            return
        elif isinstance(value, functools.partial):
            self.guards.add(
                ATTRIBUTE, value, "args", value.args, "the arguments of a partial function", self.containers
            )
            for key, part in value.keywords.items():
                self.guards.add(ITEM, value.keywords, key, part, key, self.containers)
        elif isinstance(value, type):
            if is_users_class(value) and not issubclass(value, nn.Module):
                self.members(value, value.__name__)
            if issubclass(value, torch.autograd.Function):
                self.functions_in([part for c in users_classes(value) for part in vars(c).values()])
            return
        elif is_object(value):
            self.functions_in(inspect.getattr_static(type(value), "__call__", None), depth)
        for part in functions_behind(value):
            if part is not value:
                self.functions_in(part, depth)

    def code(self, function: types.FunctionType) -> bool:
        """Returns whether the function was not followed before."""
        cells = map(id, function.__closure__ or ())
        known = (function.__code__, id(function.__globals__), *cells)
        if known in self._codes:
            return False
        self._codes.add(known)
        if not is_users(function.__code__):
            return True
        self._class_names |= class_reads(function)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(isinstance(x, PLAIN) for x in defaults):  # held for what is in them
            self.guards.add(
                ITEM, {"defaults": defaults}, "defaults", defaults, f"{function.__name__}.__defaults__", self.containers
            )
        for holder, name, value, chain in outer_reads(function):
            if isinstance(holder, types.CellType):
                if name != "__class__" and (id(holder), None) not in self.written:
                    self.value(CELL, holder, name, value, name)
            elif holder is not None and not isinstance(value, types.ModuleType) and (id(holder), name) not in self.written:
                self.value(ITEM, holder, name, value, name)
            self.chain(value, chain, name)
        return True

    def chain(self, value: Any, chain: tuple[str, ...], name: str) -> None:
        """Follows the attributes that are read one after the other."""
        for key in chain:
            name = f"{name}.{key}"
            if isinstance(value, types.ModuleType):
                if not is_users_module(value) or key not in vars(value):
                    return
                found = vars(value)[key]
                if not isinstance(found, types.ModuleType):
                    self.value(ITEM, vars(value), key, found, name)
            elif is_object(value) or (isinstance(value, type) and is_users_class(value)):
                self.read(value, key)
                found = inspect.getattr_static(value, key, None)
            elif isinstance(value, types.FunctionType) and key in vars(value):
                found = vars(value)[key]
                self.value(ITEM, vars(value), key, found, name)
            else:
                return
            value = found

    def other_module(self, sub: nn.Module) -> None:
        """A module that the forward calls and that is no part of the one that is captured."""
        self.hooks_of(sub)
        self.parts_of(sub)
        self.forward(sub, own=True)
        if "training" in sub.__dict__:
            self.guards.add(ITEM, sub.__dict__, "training", sub.training, self._name(sub, "training"))

    def scripted(self, sub: nn.Module) -> None:
        """A scripted module, whose reads are C++'s: all of its attributes."""
        concrete = getattr(sub, "_concrete_type", None)
        for key in concrete.get_attributes() if concrete is not None else ():
            if key != "training" and isinstance(value := getattr(sub, key, None), _VALUES):
                self.value(ATTRIBUTE, sub, key, value, self._name(sub, key))

    def hooks_of(self, sub: nn.Module) -> None:
        own, name = sub.__dict__, self._name(sub, "hooks")
        for key in HOOKS:
            hooks = own.get(key)
            if isinstance(hooks, dict):
                self.value(ITEM, own, key, hooks, name)

    def hooks(self, with_root: bool) -> None:
        for _, sub in self.modules if with_root else self.modules[1:]:
            self.hooks_of(sub)
        of_all = HooksOfAllModules()
        self.value(ATTRIBUTE, of_all, "now", of_all.now, "hooks of all modules")
        modes = FunctionModes()
        self.guards.add(ATTRIBUTE, modes, "now", modes.now, "the modes of torch.overrides that are on")

    def parts(self) -> None:
        """Which modules a module has, and their classes. A transformed one looks itself (`Tree`)."""
        self.guards.add_classes(self.modules)
        for _, sub in self.modules:
            self.parts_of(sub)

    def parts_of(self, sub: nn.Module) -> None:
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


_PLAIN_READS = (object.__getattribute__, nn.Module.__getattribute__)


def _has_getattr(cls: type) -> bool:
    return any("__getattr__" in vars(c) for c in cls.__mro__ if c is not nn.Module)


def guards_of(
    observer: Observer,
    modules: Modules,
    written: set[tuple[int, Any]],
    forward: Callable[..., Any] | None,
    parts: bool = False,
    inputs: list = [],  # noqa: B006 (never written)
    made_once: list = [],  # noqa: B006 (never written)
    settings: dict[str, Any] = {},  # noqa: B006 (never written)
) -> Guards:
    """Returns the guards for what a capture of `modules[0]` has read. `written`: (id of a dict or container, key) of what
    the forward itself changed. `forward`: was called instead of ``module(...)``. `parts`: holds the modules' parts, too.
    `inputs`: those of the capture that are no tensors. `made_once`: changes of slots that the forward also reads.
    `settings`: those of torch that the forward asked for, by their function."""
    make, module = _Resolver(modules, written), modules[0][1]
    for key, owner in observer.iterators.items():
        raise Error(
            f"the forward reads the iterator '{make._name(owner, key)}', and a graph has the value that it gave at the capture",
            kind=ErrorKind.Capture,
            remedy="take its next value where the model is called, and pass it as an input",
        )
    make.hooks(with_root=forward is None)
    for _, sub in make.modules:
        make.forward(sub, own=sub is not module or forward is None)
        if isinstance(sub, torch.jit.ScriptModule):
            make.scripted(sub)
    if parts:
        make.parts()
    if forward is not None:
        make.functions_in(forward)
    for part in inputs:
        make.functions_in(part)
    others = {id(o): o for o in observer.reads.values() if isinstance(o, nn.Module) and id(o) not in make.names}
    for sub in others.values():
        make.other_module(sub)
    classes = {type(sub) for _, sub in make.modules} | {type(sub) for sub in others.values()} | observer.classes
    for part in [part for cls in classes for part in parts_of_class(cls)]:
        make.functions_in(part)
    for value in observer.unnoted.values():
        make.members(value, type(value).__name__)
    for (_, key), owner in observer.reads.items():
        if key != "forward":
            make.read(owner, key)
    make.class_attributes(classes)
    make.tensors(observer, module)
    for change in made_once:
        make.guards.add_made_once(change)
    for name, value in {"get_default_dtype": torch.get_default_dtype(), **settings}.items():
        make.guards.add(ATTRIBUTE, Setting(name), "now", value, f"torch.{name}()")
    for inner in observer.inner:
        make.guards.include(inner)
    make.guards.mode_line = make.guards.mode_line or observer.mode_line
    return make.guards
