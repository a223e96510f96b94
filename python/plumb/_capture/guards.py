"""Guards: what a captured forward has read besides its inputs, parameters and buffers, and the check that it is still the same.

read_guards.py makes them. docs/differences.md says what is not followed.
"""

from __future__ import annotations

import array
import gc
import sys
import types
import weakref
from collections import OrderedDict, deque
from typing import Any, Collection

import numpy as np
import torch
from torch import Tensor, nn

from .. import _C
from .._trees import PLAIN, hashed
from .torch_patches import Modules, autocast_regions

# Kinds of entries, as bindings/guards.cpp counts them. An entry is (kind, holder, key, expected, contents).
ITEM, ABSENT, ATTRIBUTE, TENSOR, TYPE, CELL = range(6)

DEEPEST = 4  # containers in containers
MOST = 10_000  # entries of a container; a larger one is data, of which only the identity is held


MISSING = object()  # in a slot that is not there
_FLAT = frozenset({bool, int, float, str, type(None), types.FunctionType, torch.dtype, Tensor, nn.Parameter})  # have no contents


class _Same:
    """An object that only equals itself."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    __hash__ = None


_BYTES = (bytearray, array.array)


def _inside(value: Any) -> Any:
    """Returns the dict that a types.MappingProxyType shows; any other value as it is."""
    return gc.get_referents(value)[0] if isinstance(value, types.MappingProxyType) else value


def _is_followed(value: Any, depth: int) -> bool:
    """Returns whether a value is a container whose contents are held."""
    if value is sys.modules:  # which any import changes
        return False
    return depth < DEEPEST and isinstance(value, (list, tuple, dict, set, frozenset, deque)) and len(value) <= MOST


def _frozen(value: Any, depth: int = 0, skipped: Collection[int] = ()) -> Any:
    """Returns a key of a value as it is now: numbers and texts by type and value, containers by parts, all else by id.
    `skipped`: ids of containers whose contents are not held."""
    if isinstance(value, PLAIN) or (isinstance(value, np.ndarray) and value.size <= MOST):
        return hashed(value)
    if isinstance(value, _BYTES) and len(value) <= MOST:
        return type(value), bytes(value)
    value = _inside(value)
    if id(value) in skipped or not _is_followed(value, depth):
        return _Same(value)
    if isinstance(value, dict):
        return type(value), [(_frozen(k, depth + 1, skipped), _frozen(v, depth + 1, skipped)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), set(value), sorted(type(v).__name__ for v in value)  # 1, 1.0 and True are equal
    return type(value), [_frozen(v, depth + 1, skipped) for v in value]


_OWN_COPIES = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def _attributes(value: Any) -> dict | None:
    """Returns the attributes of an object that has no other state: no slots, no elements, nothing of C's. None for any other value."""
    if any(getattr(type(value), name, None) is not getattr(object, name, None) for name in _OWN_COPIES):
        return None
    try:
        _, _, attributes, elements, items = object.__reduce_ex__(value, 2)
    except Exception:  # a module, a lock, a generator
        return None
    return attributes if isinstance(attributes, dict) and elements is None and items is None else None


def _is_equal_object(now: Any, known: Any) -> bool:
    """Returns whether an object in the place of another is of its class and has its attributes. It is looked at again in every call."""
    if type(now) is not type(known) or isinstance(known, (nn.Module, Tensor)) or not (attributes := _attributes(known)):
        return False
    return _frozen(_attributes(now)) == _frozen(attributes)


def _contents(value: Any, found: list, depth: int = 0, seen: dict[int, int] | None = None) -> list:
    """Containers in `value` that can be written, each followed by the objects in it, arrays by their bytes."""
    seen = {} if seen is None else seen  # depths by id: a list of one row many times has that row once
    if isinstance(value, np.ndarray) and value.size <= MOST:
        found += [value, value.tobytes()]
    elif isinstance(value, _BYTES) and len(value) <= MOST:
        found += [value, bytes(value)]
    value = _inside(value)
    if isinstance(value, frozenset) or not _is_followed(value, depth) or seen.get(id(value), DEEPEST) <= depth:
        return found
    seen[id(value)] = depth
    parts = [x for item in value.items() for x in item] if isinstance(value, dict) else list(value)
    if isinstance(value, OrderedDict) and len(value) > 1:  # whose order bindings/guards.cpp does not see
        found += [value, ()]
    elif not isinstance(value, tuple):
        found += [value, tuple(parts)]
    for part in parts:
        _contents(part, found, depth + 1, seen)
    return found


def containers_in(value: Any) -> list[Any]:
    """Returns the containers in `value` that can be written, itself among them."""
    return _contents(value, [])[::2]


class _Tensors:
    """Which tensors the parameters, or the buffers, of a module are: `tables` of each of its parts. It keeps none of them."""

    def __init__(self, tables: list[tuple[str, Any]], left_out: Collection[tuple[int, Any]] = ()):
        self.known = [
            (table, key, id(p), p.device, f"{path}.{key}" if path else key)
            for path, table in tables
            if isinstance(table, dict)  # not of a scripted module
            for key, p in table.items()
            if p is not None and (id(table), key) not in left_out
        ]

    @property
    def other(self) -> str | None:
        """The name of one that is another tensor now, on the same device."""
        for table, key, known, device, name in self.known:
            p = table.get(key)
            if p is None or (id(p) != known and p.device == device):
                return name
        return None


class _Tied:
    """Names of a module's tensors of which several are of one tensor, which the graph has once."""

    def __init__(self, slots: list[tuple[dict, str, str, Tensor]]):
        first: dict[int, tuple[dict, str, str, Tensor]] = {}
        self._pairs = []
        for slot in slots:
            known = first.setdefault(id(slot[3]), slot)
            if (id(known[0]), known[1]) != (id(slot[0]), slot[1]):
                self._pairs.append((known[0], known[1], *slot[:3]))

    def __bool__(self) -> bool:
        return bool(self._pairs)

    @property
    def other(self) -> str | None:
        """The name of one that has a tensor of its own now."""
        for table, key, other, leaf, name in self._pairs:
            if table.get(key) is not other.get(leaf):
                return name
        return None


class _MadeOnce:
    """A slot of a table that the forward fills where it is empty: it holds what was there before, or what the forward makes."""

    def __init__(self, table: Any, key: Any, values: tuple):
        self._table, self._key, self._values = table, key, [_frozen(v) for v in values]

    @property
    def unchanged(self) -> bool:
        live = self._table
        there = self._key in live if isinstance(live, dict) else self._key < len(live)
        return _frozen(live[self._key] if there else MISSING) in self._values


class _Classes:
    """The classes of modules. It keeps none of them alive."""

    def __init__(self, modules: Modules):
        self.known = [
            (weakref.ref(sub), type(sub), f"{path}.__class__" if path else "__class__") for path, sub in modules
        ]

    @property
    def other(self) -> str | None:
        """The name of one that has another class now."""
        for part, known, name in self.known:
            if (sub := part()) is not None and type(sub) is not known:
                return name
        return None


class Guards:
    """Entries for what was read, and a name for each. Empty: nothing is held."""

    def __init__(self) -> None:
        self.entries: list[tuple] = []
        self.names: list[str] = []
        self._frozen: list[Any] = []
        self._known: set[tuple] = set()
        self.broken = ""  # the name of what the last hold() found changed
        self.mode_line = ""  # the first line outside of torch that reads a module's `training`
        self._module: Any = None

    def add(self, kind: int, holder: Any, key: Any, expected: Any, name: str, skipped: set[int] = frozenset()) -> bool:
        """Adds an entry. `skipped`: ids of containers whose contents are not held."""
        known = kind, id(holder), key
        if known in self._known:
            return False
        self._known.add(known)
        held, frozen = (), None  # a value without contents is frozen when another is compared with it
        if type(expected) is OrderedDict and not expected and id(expected) not in skipped:
            held, frozen = (expected, ()), (OrderedDict, [])  # most entries: hooks of a module that has none
        elif kind in (ITEM, ATTRIBUTE, CELL) and type(expected) not in _FLAT and (contents := _contents(expected, [])):
            pairs = zip(contents[::2], contents[1::2])
            held = tuple([x for pair in pairs if id(pair[0]) not in skipped for x in pair])
            frozen = _frozen(expected, 0, skipped)
        self.entries.append((kind, holder, key, expected, held))
        self._frozen.append(frozen)
        self.names.append(name)
        return True

    def include(self, other: Guards) -> None:
        """Adds the entries of a graph that is called inside of this one."""
        for entry, frozen, name in zip(other.entries, other._frozen, other.names):
            if (known := (entry[0], id(entry[1]), entry[2])) not in self._known:
                self._known.add(known)
                self.entries.append(entry)
                self._frozen.append(frozen)
                self.names.append(name)
        self.mode_line = self.mode_line or other.mode_line

    def add_state(self, slots: list[tuple[dict, str, str, Tensor]]) -> None:
        """Adds dtype, device and shape of parameters and buffers: (table, key, full name, tensor)."""
        for table, key, name, _ in slots:
            tensor = table[key] if key in table else None
            if isinstance(table, dict) and isinstance(tensor, Tensor):
                self.add(TENSOR, table, key, (tensor.dtype, tensor.device, tensor.shape), name)
        if tied := _Tied([slot for slot in slots if isinstance(slot[0], dict)]):
            self.add(ATTRIBUTE, tied, "other", None, "")

    def add_parameters(self, modules: Modules) -> None:
        """Adds which tensors the modules' parameters are. A module that is moved to another device gets new ones."""
        tables = [(path, sub._parameters) for path, sub in modules]
        self.add(ATTRIBUTE, _Tensors(tables), "other", None, "")

    def add_made_once(self, change: Any) -> None:
        """Adds a slot that the forward has changed and that it also reads, a `Change` of attribute_writes.py."""
        values = (change.before, change.now)
        self.add(ATTRIBUTE, _MadeOnce(change.table.live, change.key, values), "unchanged", True, change.name)

    def add_buffers(self, modules: Modules, written: set[tuple[int, Any]]) -> None:
        """Adds which tensors the modules' buffers are. `written`: (id of a table, key) of those that the forward replaces."""
        tables = [(path, sub._buffers) for path, sub in modules]
        self.add(ATTRIBUTE, _Tensors(tables, written), "other", None, "")

    def add_classes(self, modules: Modules) -> None:
        """Adds the classes of the modules."""
        self.add(ATTRIBUTE, _Classes(modules), "other", None, "")

    def hold(self) -> bool:
        """Returns whether everything is as it was read. Values that are equal and other objects are the same."""
        i = _C.first_changed(self.entries)
        while i >= 0:
            if not self._still(i):
                self.broken = self.names[i] or self.entries[i][1].other
                return False
            i = _C.first_changed(self.entries, i + 1)
        return True

    def _still(self, i: int) -> bool:
        kind, holder, key, expected, _ = self.entries[i]
        try:
            if kind == ITEM:
                now = holder[key]
            elif kind == ATTRIBUTE:
                now = getattr(holder, key)
            elif kind == CELL:
                now = holder.cell_contents
            else:
                return False
        except (AttributeError, KeyError, ValueError):
            return False
        frozen = self._frozen[i] or _frozen(expected)
        if isinstance(frozen, _Same):
            return _is_equal_object(now, frozen.it)
        if _frozen(now) != frozen:
            return False
        self.entries[i] = (kind, holder, key, now, tuple(_contents(now, [])))
        return True

    def end_with(self, module: nn.Module) -> Any:
        """Holds as long as this module exists: the entries would keep its parts. Returns the weak reference to it."""
        self._module = weakref.ref(module, lambda _, guards=weakref.ref(self): guards() and guards()._clear())
        return self._module

    def _clear(self) -> None:
        self.entries, self.names, self._frozen, self._known = [], [], [], set()

    def __deepcopy__(self, memo: dict) -> Guards:
        return Guards()  # a copy of a graph holds nothing of the model it was captured from

    def __reduce__(self) -> tuple:
        return Guards, ()


class GraphStore(OrderedDict[Any, list]):
    """Graphs by a key of what they were made for, the key used last at the end. Graphs of one key differ in their `guards`,
    the last used first. `most` keys, `most_of_key` graphs of each: what was unused for longest goes."""

    def __init__(self, most: int, most_of_key: int):
        super().__init__()
        self.most, self.most_of_key = most, most_of_key

    def find(self, key: Any) -> Any:
        """Returns the graph of this key whose guards hold; None if there is none."""
        for place, graph in enumerate(graphs := self.get(key, [])):
            if graph.guards.hold():
                if place:
                    graphs.insert(0, graphs.pop(place))
                self.move_to_end(key)
                return graph
        return None

    def add(self, key: Any, graph: Any) -> Any:
        """Returns the graph of this key that goes for it; None if none does."""
        graphs = self.setdefault(key, [])
        gone = graphs.pop() if len(graphs) == self.most_of_key else None
        graphs.insert(0, graph)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
        return gone


def enabled_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Returns the devices, of the CPU and the accelerator, for which autocast is on, and its dtypes."""
    return tuple((device, dtype) for device, enabled, dtype in autocast_regions() if enabled)


class Tree:
    """The modules below a module, remembered: walking over them costs more than running a small graph."""

    def __init__(self, root: nn.Module):
        modules = list(root.modules())
        self.keyed = [m for m in modules if hasattr(type(m), "graph_key")]
        self._tables = [m.__dict__ for m in modules]
        self._scripted = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]  # whose modes are C++'s
        self._guards = Guards()
        for m in modules:
            self._guards.add(TYPE, m, None, type(m), "")
            if isinstance(m._modules, dict):  # a scripted module's stays
                self._guards.add(ITEM, m.__dict__, "_modules", m._modules, "")

    def is_current(self) -> bool:
        return _C.first_changed(self._guards.entries) < 0

    def modes(self) -> tuple:
        modes = _C.modes_of(self._tables, "training")
        return (modes, *[m.graph_key() for m in self.keyed], *[m.training for m in self._scripted])
