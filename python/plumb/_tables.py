"""A module's state outside of its parameters and buffers: attributes, and the dicts, lists and objects in them."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, Iterator, NamedTuple

from torch import Tensor, nn

MISSING = object()  # in a slot that is not there
_MOST = 10_000  # entries of a table; a larger one is data
_DEEPEST = 4
_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # others look after these
_LIBRARIES = ("torch", "plumb", "numpy", "builtins")  # whose objects keep no state of the model's


class Table(NamedTuple):
    """A dict, list, deque or set that a forward may write, called `name` from the root, and what is in it `before`."""

    name: str
    live: Any
    before: Any
    dotted: bool  # it has the attributes of a module or another object
    module: nn.Module | None = None  # whose attributes it has
    holds_buffers: bool = False  # of a module
    parent: Table | None = None  # in which this one was, under `key`
    key: Any = None

    def slot(self, key: Any) -> str:
        if key is None and not isinstance(self.live, dict):
            return self.name
        if self.dotted:
            return f"{self.name}.{key}" if self.name else str(key)
        return f"{self.name}[{key!r}]"

    def current(self) -> Table:
        """The one that is in its place now."""
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
        elif key is None:
            self.live.clear()
            self.live.update(value) if isinstance(self.live, set) else self.live.extend(value)
        else:
            self.live[key] = value

    def differences(self) -> Iterator[tuple[Any, Any, Any]]:
        """(key, before, now) of slots with another object; with the key None all of a set, or of a list that has another
        length."""
        if isinstance(self.live, dict):
            for key in [*self.before, *(k for k in self.live if k not in self.before)]:
                before, now = self.before.get(key, MISSING), self.live.get(key, MISSING)
                if now is not before:
                    yield key, before, now
        elif isinstance(self.live, set) or len(self.live) != len(self.before):
            if self.live != self.before:
                yield None, self.before, list(self.live)
        else:
            yield from [(i, a, b) for i, (a, b) in enumerate(zip(self.before, self.live)) if a is not b]


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
    if not isinstance(value, (dict, list, deque, set)):
        live, dotted = getattr(value, "__dict__", None), True
        if not isinstance(live, dict) or isinstance(value, (type, nn.Module, Tensor)) or callable(value):
            return
        if type(value).__module__.partition(".")[0] in _LIBRARIES:
            return
    if id(live) in seen or depth > _DEEPEST or len(live) > _MOST:
        return
    seen.add(id(live))
    table = Table(name, live, dict(live) if isinstance(live, dict) else copy.copy(live), dotted, parent=parent, key=key)
    found.append(table)
    for key, v in list(live.items() if isinstance(live, dict) else enumerate(live)):
        _walk(table.slot(key), v, depth + 1, found, seen, table, key)


def tables(module: nn.Module) -> list[Table]:
    """Of all modules, in the order in which a walk from the root meets them."""
    found: list[Table] = []
    seen: set[int] = set()

    for name, sub in module.named_modules():
        table = Table(name, sub.__dict__, dict(sub.__dict__), True, sub)
        found.append(table)
        if isinstance(sub._buffers, dict):  # those of a scripted module are C++'s
            found.append(Table(name, sub._buffers, dict(sub._buffers), True, holds_buffers=True))
        for key, value in list(sub.__dict__.items()):
            if key not in _STATE and key != "forward":
                _walk(table.slot(key), value, 1, found, seen, table, key)
    return found
