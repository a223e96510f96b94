"""Writes of a forward into its module besides parameters and buffers (attributes, and the dicts, lists and objects in
them), and the restoring of the module after a capture. Modules that a capture refuses."""

from __future__ import annotations

import copy
import pickle
import random
import reprlib
import sys
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from operator import is_
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from .._state import constants_of
from .._trees import PLAIN, holds_tensors
from .attribute_reads import assigned_outside, is_object, is_users, is_users_class, outer_reads
from .guards import DEEPEST, MISSING, MOST
from .torch_patches import Modules

_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # others look after these
_LIBRARIES = ("torch", "plumb", "numpy", "builtins")  # whose objects keep no state of the model's


class Table(NamedTuple):
    """A dict, list, deque, set, array of NumPy or variable of a closure that a forward may write, called `name` from the root, and what is in it `before`."""

    name: str
    live: Any
    before: Any
    dotted: bool  # it has the attributes of a module or another object
    module: nn.Module | None = None  # whose attributes it has
    holds_buffers: bool = False  # true for the _buffers of a module
    parent: Table | None = None  # in which this one was, under `key`
    key: Any = None
    outer: bool = False  # functions have it by a global or a closure: only tensors that are left in it are looked at

    def slot(self, key: Any) -> str:
        if key is None and not isinstance(self.live, dict):
            return self.name
        if self.dotted:
            return f"{self.name}.{key}" if self.name else str(key)
        return f"{self.name}[{key!r}]"

    def current(self) -> Table:
        """Returns the one that is in its place now."""
        if self.parent is None:
            return self
        try:
            value = self.parent.current().live[self.key]
        except (LookupError, TypeError):
            return self
        live = getattr(value, "__dict__", None) if self.dotted else value
        return self._replace(live=live) if type(live) is type(self.live) else self

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.live, dict):
            if value is MISSING:
                self.live.pop(key, None)
            else:
                self.live[key] = value
        elif isinstance(self.live, np.ndarray):
            self.live[...] = value
        elif isinstance(self.live, types.CellType):
            self.live.cell_contents = value
        elif key is None:
            self.live.clear()
            self.live.update(value) if isinstance(self.live, set) else self.live.extend(value)
        else:
            self.live[key] = value

    def differences(self) -> Sequence[tuple[Any, Any, Any]]:
        """(key, before, now) of slots with another object; with the key None all of a set, array or variable, or of a list that got
        longer or shorter."""
        live, before = self.live, self.before
        if isinstance(live, dict):
            if len(live) == len(before) and all(map(is_, live, before)) and all(map(is_, live.values(), before.values())):
                return ()  # most tables are as they were, at every call of a forward
            slots = [(key, before.get(key, MISSING), live.get(key, MISSING)) for key in {**before, **live}]
            return [slot for slot in slots if slot[1] is not slot[2]]
        if isinstance(live, types.CellType):
            return [(None, before, live.cell_contents)] if live.cell_contents is not before else ()
        if isinstance(live, np.ndarray):
            return [(None, before, live.copy())] if live.tobytes() != before.tobytes() else ()
        if isinstance(live, set) or len(live) != len(before):
            return [(None, before, list(live))] if live != before else ()
        return [(i, a, b) for i, (a, b) in enumerate(zip(before, live)) if a is not b]


def changed_slots(tables: Iterable[Table]) -> Iterator[tuple[Table, Any, Any, Any]]:
    """Returns (table, key, before, now) of all slots with another object. They may be written meanwhile."""
    for table in tables:
        for key, before, now in table.differences():
            yield table, key, before, now


def same_objects(a: Any, b: Any) -> bool:
    return a is b or (
        isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(x is y for x, y in zip(a, b))
    )


def _walk(
    name: str, value: Any, depth: int, found: list[Table], seen: set[int], parent: Table | None = None, key: Any = None
) -> None:
    """Adds the tables in `value` to `found`. `value` is in `parent` under `key`."""
    if isinstance(value, tuple):
        for i, v in enumerate(value):
            _walk(f"{name}[{i}]", v, depth + 1, found, seen)
        return
    live, dotted = value, False
    if isinstance(value, np.ndarray):
        if value.size <= MOST and id(value) not in seen:
            seen.add(id(value))
            found.append(Table(name, value, value.copy(), False, parent=parent, key=key))
        return
    if not isinstance(value, (dict, list, deque, set)):
        live, dotted = getattr(value, "__dict__", None), True
        if not isinstance(live, dict) or isinstance(value, (type, nn.Module, Tensor)) or callable(value):
            return
        if str(type(value).__module__).partition(".")[0] in _LIBRARIES:
            return
    if id(live) in seen or depth > DEEPEST or len(live) > MOST:
        return
    seen.add(id(live))
    table = Table(name, live, dict(live) if isinstance(live, dict) else copy.copy(live), dotted, parent=parent, key=key)
    found.append(table)
    for key, v in list(live.items() if isinstance(live, dict) else enumerate(live)):
        _walk(table.slot(key), v, depth + 1, found, seen, table, key)


class ModuleTables:
    """The tables of all modules, in the order in which a walk from the root meets them. A dict of a module's that was empty,
    such as its hooks, is one as soon as something is in it."""

    def __init__(self, modules: Modules):
        self._tables: list[Table] = []
        self._empty: list[tuple[Table, str, OrderedDict]] = []  # (table of the module's attributes, key, dict)
        seen: set[int] = set()
        for name, sub in modules:
            table = Table(name, sub.__dict__, dict(sub.__dict__), True, sub)
            self._tables.append(table)
            if isinstance(sub._buffers, dict):  # those of a scripted module are C++'s
                self._tables.append(Table(name, sub._buffers, dict(sub._buffers), True, holds_buffers=True))
            for key, value in table.before.items():
                if type(value) is OrderedDict and not value:
                    if id(value) not in seen:
                        seen.add(id(value))
                        self._empty.append((table, key, value))
                elif type(value) not in PLAIN and key not in _STATE and key != "forward":
                    _walk(table.slot(key), value, 1, self._tables, seen, table, key)

    def add_outer(self, functions: Iterable[Any]) -> None:
        """Adds what functions of the user's may write besides: their globals, and what globals and closures hold."""
        found: list[Table] = []
        seen = {id(table.live) for table in self._tables}
        for function in functions:
            if isinstance(function, types.FunctionType) and is_users(function.__code__):
                to_globals, cells = assigned_outside(function)
                if to_globals and id(function.__globals__) not in seen:
                    seen.add(id(function.__globals__))
                    found.append(Table("", function.__globals__, dict(function.__globals__), True))
                found += [Table(name, cell, cell.cell_contents, False) for name, cell in cells.items()]
                for read in outer_reads(function):
                    _walk(read.name, read.value, 1, found, seen)
            elif is_object(function) and is_users_class(type(function)):
                _walk(type(function).__name__, function, 1, found, seen)
        self._tables += [table._replace(outer=True) for table in found]

    def __iter__(self) -> Iterator[Table]:
        yield from self._tables
        for table, key, live in self._empty:
            if live:
                yield Table(table.slot(key), live, {}, False, parent=table, key=key)


_PLAIN_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, np.ndarray)


def input_tables(args: tuple, kwargs: dict) -> list[Table]:
    """Returns the tables of lists, dicts, arrays and objects of the user's that a forward is given."""
    found: list[Table] = []
    for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        parts = value if type(value) is tuple else (value,)
        for part in parts:
            if type(part) in _PLAIN_CONTAINERS or (is_object(part) and is_users_class(type(part))):
                _walk(name, part, 1, found, set())
    return found


def written_input(tables: list[Table]) -> str:
    """Returns the name of a slot of these that the forward has written, and puts all of them back. Empty: there is none."""
    name = ""
    for table, key, before, now in changed_slots(tables):
        table.put(key, before)
        if not (isinstance(before, PLAIN) and type(now) is type(before) and now == before):
            name = name or table.slot(key)
    return name


class Change(NamedTuple):
    """`key` of `table`, called `name` from the root, was `before` and is `now`. `computed`: autograd made `now` of inputs."""

    table: Table
    key: Any
    name: str
    before: Any
    now: Any
    computed: bool = False

    def put(self) -> None:
        self.table.put(self.key, self.now)


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def refuse_modules(module: nn.Module, with_root: bool) -> None:
    """Refuses what a graph would leave out in silence: layers without parameters yet, hooks on gradients."""
    for name, sub in module.named_modules():
        for key, p in [*sub._parameters.items(), *sub._buffers.items()]:
            if torch.nn.parameter.is_lazy(p):
                raise Error(
                    f"'{_full(name, key)}' of {type(sub).__name__} has no shape yet",
                    kind=ErrorKind.InvalidState,
                    remedy="call the model once, lazy layers take their shapes from the first input",
                )
        of_all = nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
        if of_all and sub is not module:
            raise Error(
                f"there are backward hooks of all modules, which a graph would not call for module '{name}' ({type(sub).__name__})",
                kind=ErrorKind.Capture,
                remedy="remove them (the handle's remove()), hook parameters or the model's output",
            )
        if (sub._backward_hooks or sub._backward_pre_hooks) and (sub is not module or with_root):
            raise Error(
                f"module '{name}' ({type(sub).__name__}) has backward hooks, which a graph would not call",
                kind=ErrorKind.Capture,
                remedy="remove them (the handle's remove()), hook parameters or the model's output, or write them as a "
                "torch.autograd.Function",
            )


def random_states() -> tuple[Tensor, Tensor | None]:
    """Returns the states of torch's generators: the CPU's, and that of the current accelerator if there is one in use."""
    device = torch.accelerator.current_accelerator()
    module = device and torch.get_device_module(device)
    used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return torch.get_rng_state(), module.get_rng_state() if used else None


def set_random_states(states: tuple[Tensor, Tensor | None]) -> None:
    cpu, accelerator = states
    torch.set_rng_state(cpu)
    if accelerator is not None:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(accelerator)


class ModuleStateGuard:
    """Keeps attributes of modules and the random states of Python and NumPy, puts them back after a capture, and tells what
    the forward did to them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = list(module.named_modules())
        self.tables = ModuleTables(self.modules)
        self.parts = [  # those of a scripted module are C++'s
            (name, what, table, dict(table))
            for name, sub in self.modules
            for what, table in (("parameter", sub._parameters), ("module", sub._modules))
            if isinstance(table, dict)
        ]
        self.modes = [(sub, sub.training) for _, sub in self.modules]
        self.changes: list[Change] = []  # changed values that are no tensors, as the last restore() found them
        # Changed slots with tensors, as the last tensors() found them: those that held none in the same places, and those that did.
        self.kept: list[Change] = []
        self.renewed: list[Change] = []
        self.left: dict[str, Any] = {}  # by their names, the very objects
        self.outer: dict[tuple[int, Any], tuple[Table, Any, Any]] = {}  # by (id of the table, key): (table, key, before)
        self.written: set[tuple[int, Any]] = set()  # all slots that the forward has written: (id of the table, key)
        self.random = random.getstate()
        self.numpy = getattr(sys.modules.get("numpy"), "random", None)
        self.numpy_state = self.numpy.get_state() if self.numpy else None
        self.generators = [
            (_full(name, key), value, copy.deepcopy(value))
            for name, sub in self.modules
            for key, value in sub.__dict__.items()
            if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))
        ]

    def note_outer(self, ended: bool) -> None:
        """Notes slots outside of the module in which the forward has left what it computes: they get back what was there. `ended`: the
        forward has ended with an exception, and what of it was computed cannot be told."""
        for table, key, before, now in changed_slots(table for table in self.tables if table.outer):
            left = [x for x in pytree.tree_leaves(now) if holds_tensors(x)]
            if any(ended or not isinstance(x, Tensor) or _C.is_computed(x) for x in left):
                self.outer[id(table.live), key] = table, key, before

    def tensors(self) -> list[tuple[str, Tensor, Tensor]]:
        """Tensors outside of parameters and buffers that were re-assigned: (name, old, new). The old ones, and buffers that
        were None, are there again afterwards; new ones are gone."""
        changed = []
        self.kept, self.renewed, self.left = [], [], {}
        for table, key, old, now in changed_slots(self.tables):
            leaves, spec = pytree.tree_flatten(now)
            if not any(isinstance(x, Tensor) for x in leaves):
                continue
            if table.outer and (id(table.live), key) not in self.outer:
                continue
            self.written.add((id(table.live), key))
            name = table.slot(key)
            before, before_spec = pytree.tree_flatten(old)
            alike = spec == before_spec and all(
                isinstance(a, Tensor) == isinstance(b, Tensor) for a, b in zip(before, leaves)
            )
            if alike:
                pairs = [
                    (i, a, b)
                    for i, (a, b) in enumerate(zip(before, leaves))
                    if isinstance(a, Tensor) and a is not b
                ]
                changed += [(f"{name}[{i}]" if len(leaves) > 1 else name, a, b) for i, a, b in pairs]
            self.left[name] = now
            plain = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), now)
            change = Change(table, key, name, old, plain, self._hang_on_inputs(leaves))
            (self.renewed if alike else self.kept).append(change)
            table.put(key, old)
        return changed

    def not_written_back(self, engine: Any) -> list[Change]:
        """Returns the changed slots of which the graph does not write the new tensors over the old ones: it reads none of these."""
        read = set(map(id, constants_of(engine).values()))
        return self.kept + [c for c in self.renewed if not any(id(t) in read for t in pytree.tree_leaves(c.before))]

    def refuse_new_parts(self) -> None:
        """Raises `plumb.Error` if the forward has made or replaced parameters or modules, after it has taken them away again."""
        found = None
        for owner, what, now, before in self.parts:
            changed = [key for key in {**before, **now} if now.get(key) is not before.get(key)]
            if changed:
                found = found or (what, _full(owner, changed[0]), getattr(before.get(changed[0]), "is_meta", False))
                now.clear()
                now.update(before)
        if found:
            what, name, was_elsewhere = found
            raise Error(
                f"the forward makes the {what} '{name}', and a graph has those that were there before",
                kind=ErrorKind.Capture,
                remedy="keep weights where the model runs, without hooks that bring them for a call (offloading)"
                if was_elsewhere
                else "if the layer makes it on its first batch, run the model once before; else make it in the constructor",
            )

    def _hang_on_inputs(self, tensors: list) -> bool:
        """Returns whether autograd would pass a gradient of these to anything but the module's parameters."""
        own = {id(p) for p in self.module.parameters()}
        nodes = [x.grad_fn for x in tensors if isinstance(x, Tensor) and x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable") and id(node.variable) not in own:
                return True
            further = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= further
            nodes += further
        return False

    def restore(self, warn: bool = True) -> list[str]:
        """Puts everything back. Returns notes on changes; `warn`: random draws are warned of, too."""
        notes, drawn = [], []
        self.changes = []
        for table, key, before in self.outer.values():
            table.put(key, before)
        self.outer = {}
        for table, key, before, now in changed_slots(table for table in self.tables if not table.outer):
            # A new attribute goes: it may say that the forward has done what is undone here, such as registering hooks.
            stays = before is not MISSING and not isinstance(before, PLAIN) and not holds_tensors(now)
            if table.dotted and (key == "training" or stays):
                continue
            if isinstance(before, PLAIN) and type(now) is type(before) and (now == before or now != now):
                continue
            self.written.add((id(table.live), key))
            table.put(key, before)
            name = table.slot(key)
            self.changes.append(Change(table, key, name, before, now))
            if all(
                isinstance(x, (*PLAIN, np.ndarray))
                for x in pytree.tree_leaves([b for b in (before, now) if b is not MISSING])
            ):
                told = ["nothing" if x is MISSING else reprlib.repr(x) for x in (before, now)]
                notes.append(
                    f"attribute '{name}' changed from {told[0]} to {told[1]} in the forward: a graph does not"
                )
        for sub, training in self.modes:
            if sub.training is not training:
                sub.training = training
        if random.getstate() != self.random:
            random.setstate(self.random)
            drawn.append("Python's random")
        if self.numpy and not _same(self.numpy.get_state(), self.numpy_state):
            self.numpy.set_state(self.numpy_state)
            drawn.append("NumPy's random")
        for name, generator, before in self.generators:
            if pickle.dumps(generator) != pickle.dumps(before):
                _set_generator(generator, copy.deepcopy(before))
                drawn.append(f"the '{name}'")
        for generator in drawn:
            note = f"the forward draws from {generator} generator: what follows from it is the same in every run of the graph"
            notes.append(note)
            if warn:
                warnings.warn(f"{note}. Draw with torch to have it drawn in every run.", stacklevel=2)
        return notes


def _set_generator(generator: Any, to: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(to.getstate())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = to.bit_generator.state
    else:
        generator.set_state(to.get_state())


def _same(a: tuple, b: tuple) -> bool:
    return (a[1] == b[1]).all() and a[2:] == b[2:]
